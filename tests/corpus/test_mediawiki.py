"""Dumps of MediaWiki in other languages than English: their names of namespaces, magic words and redirects."""

from __future__ import annotations

import bz2
from pathlib import Path

import pytest

from pretrain.config import SourceConfig
from pretrain.corpus import inputs, records
from pretrain.corpus.sources import mediawiki
from tests.corpus.test_sources import page, read

# Namespaces of files and categories, an older name of the former, options of pictures, how a redirect begins, and a
# magic word, as each Wikipedia's help pages have them.
WIKIS = {
    "ar": "ملف تصنيف صورة تصغير|يسار|250بك #تحويل __لافهرس__",
    "de": "Datei Kategorie Bild mini|rechts|250px #WEITERLEITUNG __KEIN_INHALTSVERZEICHNIS__",
    "es": "Archivo Categoría Imagen miniaturadeimagen|derecha|250px #REDIRECCIÓN __SIN_TDC__",
    "fa": "پرونده رده تصویر بندانگشتی|راست|250پیکسل #تغییرمسیر __بی‌فهرست__",
    "fi": "Tiedosto Luokka Kuva pienoiskuva|oikea|250px #OHJAUS __EISISLUETT__",
    "fr": "Fichier Catégorie Image vignette|droite|250px #REDIRECTION __AUCUNSOMMAIRE__",
    "he": "קובץ קטגוריה תמונה ממוזער|שמאל|250px #הפניה __ללא_תוכן__",
    "hi": "चित्र श्रेणी Image अंगूठाकार|दाएँ|250पिक्सेल #अनुप्रेषित __विषयसूचीहीन__",
    "it": "File Categoria Immagine miniatura|destra|250px #RINVIA __NOTOC__",
    "ja": "ファイル カテゴリ 画像 サムネイル|右|250px #転送 __目次非表示__",
    "ko": "파일 분류 그림 섬네일|오른쪽|250픽셀 #넘겨주기 __목차숨김__",
    "nl": "Bestand Categorie Afbeelding miniatuur|rechts|250px #DOORVERWIJZING __GEENINHOUD__",
    "pl": "Plik Kategoria Grafika mały|prawo|250px #PATRZ __BEZSPISU__",
    "pt": "Ficheiro Categoria Imagem miniaturadaimagem|direita|250px #REDIRECIONAMENTO __SEMTDC__",
    "ru": "Файл Категория Изображение мини|справа|250пкс #ПЕРЕНАПРАВЛЕНИЕ __БЕЗ_ОГЛАВЛЕНИЯ__",
    "sv": "Fil Kategori Bild miniatyr|höger|250px #OMDIRIGERING __INGENINNEHÅLLSFÖRTECKNING__",
    "tr": "Dosya Kategori Resim küçükresim|sağ|250pik #YÖNLENDİR __İÇİNDEKİLERYOK__",
    "uk": "Файл Категорія Зображення міні|праворуч|250пкс #ПЕРЕНАПРАВЛЕННЯ __БЕЗ_ЗМІСТУ__",
    "vi": "Tập_tin Thể_loại Hình nhỏ|phải|250px #đổi __KHÔNGMỤCLỤC__",
    "zh": "文件 分类 图像 缩略图|右|250px #重定向 __无目录__",
}
HEAD = (
    '<mediawiki version="0.11" xml:lang="{}">\n<siteinfo><namespaces><namespace key="-2" case="first-letter">Media'
    '</namespace>\n<namespace key="0" case="first-letter" /><namespace key="6" case="first-letter">{}</namespace>'
    '<namespace key="14" case="first-letter">{}</namespace><namespace key="100">{}</namespace></namespaces></siteinfo>'
)


@pytest.mark.parametrize("language", WIKIS)
def test_no_names_options_and_links_to_other_wikis_are_left(tmp_path: Path, monkeypatch, language: str) -> None:
    file, category, alias, options, redirect, magic = WIKIS[language].split()
    file, category = file.replace("_", " "), category.replace("_", " ")
    pages = [
        page(
            f"P{n}",
            f"[[{file}:P.jpg|{options}|See [[X|this]] and ''[[Y]]'' [http://x z]]]\n"
            f"<center>[[{alias.lower()}:P.jpg|{options}|Q]]</center>\n"
            f"'''P{n}''' is [[x|here]] and [[:{category}:A|A]].{magic}\n"
            f"* [[ \u200f{file.replace(' ', '_')} : P.jpg]][[Image:P.jpg|{options}]]\n[[:fr:B|B]] is __init__.\n\n"
            f"[[{category}:C|*]][[{category.upper()}:D]]\n[[Category:E]]\n[[en:F]]\n[[zh-min-nan:G|G]]\n[[simple:H]]",
        )
        for n in range(9)
    ]
    pages.insert(4, page("R", f"{redirect} [[P1]]\n[[{category}:R]]"))
    expected = [f"P{n} is here and A.\nB is __init__." for n in range(9)]
    head = HEAD.format(language, file, category, "Portal")
    for size in (700, 1 << 20):
        monkeypatch.setattr(inputs, "CHUNK_BYTES", size)
        monkeypatch.setattr(records, "BZIP2_CHUNK_BYTES", size)
        for name, parts in (("whole.xml", [head, *pages]), ("piece.xml", pages), ("multi.xml.bz2", [head, *pages])):
            data = [bz2.compress(part.encode()) if "bz2" in name else part.encode() for part in parts]
            (tmp_path / name).write_bytes(b"".join(data))
            assert read(SourceConfig(kind="mediawiki", path=str(tmp_path / name))) == (expected, []), (name, size)


def test_the_head_of_a_dump_says_what_a_namespace_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CHUNK_BYTES", 50)
    text = "A [[Plaatje:X|thumb|no]] b [[Bild:Y|yes]] c [[Rubriek:Z]] d [[Alien: Rerun|e]] [[CSI: Miami]] [[nds:Q|f]]."
    text += "[[Bildje:P.JPG|thumb|g]]"
    for name, other in (("a", "Bild"), ("b", "Portal")):
        (tmp_path / f"{name}.xml").write_text(HEAD.format("nds", "Plaatje", "Rubriek", other) + page("P", text))
    found = read(SourceConfig(kind="mediawiki", path=str(tmp_path)))
    assert found == (["A b yes c d e CSI: Miami f.", "A b c d e CSI: Miami f."], [])


def test_the_first_variant_of_a_language_is_read() -> None:
    text = "-{T|zh:C}--{zh-hans:计算机; zh-hant:電腦;}-是-{A|zh-cn:软件;zh-tw:軟體}--{X}--{}-。-{H|zh-cn:a;zh-tw:b}-"
    assert mediawiki.plain_text(text, frozenset()) == "计算机是软件X。"
    assert mediawiki.plain_text("От -{http://x}- -{sr-ec:а; sr-el:b}- -{", frozenset()) == "От http://x а -{"
