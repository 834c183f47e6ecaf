"""WordPiece of plain words by numpy: all words traverse a trie of the vocabulary together, one letter per step."""

import numpy as np
from tokenizers import Tokenizer

from pretrain.corpus.keytable import KeyTable

MAX_LETTERS = 16  # of a word, and therefore of a token
# Roots of the tokens that start a word, and of the tokens that continue one ("##ing").
_BEGINNING, _CONTINUATION = 1, 2


class TokenTrie:
    """The ASCII tokens of a BERT vocabulary, as a hash table from (node, letter) to the next node."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self._unknown = vocabulary["[UNK]"]
        fitting = [t for t in vocabulary if t.isascii() and 0 < len(t.removeprefix("##")) <= MAX_LETTERS]
        letters = np.array([token.removeprefix("##").encode() for token in fitting], f"S{MAX_LETTERS}")
        letters = letters.view(np.uint8).reshape(-1, MAX_LETTERS)
        nodes = np.array([_CONTINUATION if token.startswith("##") else _BEGINNING for token in fitting])
        self._next, size = KeyTable(1, capacity=2 * len(fitting)), 3
        for position in range(MAX_LETTERS):
            longer = np.flatnonzero(letters[:, position])
            children, new = self._next.lookup([_edges(nodes[longer], letters[longer, position])], size)
            nodes[longer] = children
            size += len(new[0])
        self._tokens = np.full(size, -1, np.int32)  # the token whose last letter leads to the node
        self._tokens[nodes] = [vocabulary[token] for token in fitting]

    def walk(self, letters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return word number and id of every token: the longest match in a word, then the longest in its rest, ...

        letters: uint8 [words, 16], printable ASCII padded with zeros. If no token matches the rest of a word, the
        word is one [UNK]. The tokens of each word are in order; tokens of different words are interleaved.
        """
        lengths = np.count_nonzero(letters, axis=1)
        letters = np.pad(letters, ((0, 0), (0, 1)))  # a zero follows the last letter, and no edge has it
        words = np.arange(len(letters))
        # For every unfinished word: its number, node and letters read, then the longest token so far and its end.
        walkers = np.stack([words, *np.tile([[_BEGINNING], [0], [-1], [0]], len(words))])
        matched, unknown = [np.zeros((2, 0), np.int64)], [words[:0]]
        while walkers.size:
            word, node, read, token, end = walkers
            node[:], stuck = self._next.find([_edges(node, letters[word, read])])
            node[stuck] = 0
            read += 1
            met = np.flatnonzero(self._tokens[node] >= 0)
            token[met], end[met] = self._tokens[node[met]], read[met]
            if not stuck.size:
                continue
            lost = stuck[token[stuck] < 0]
            unknown.append(word[lost])
            matched.append(walkers[[[0], [3]], stuck[token[stuck] >= 0]])
            node[stuck], read[stuck], token[stuck] = _CONTINUATION, end[stuck], -1
            staying = np.ones(len(word), bool)
            staying[lost] = False
            staying[stuck[end[stuck] == lengths[word[stuck]]]] = False
            walkers = walkers[:, staying]
        lost = np.concatenate(unknown)
        of_word, tokens = np.concatenate(matched, axis=1)
        known = ~np.isin(of_word, lost)
        return (
            np.concatenate([of_word[known], lost]),
            np.concatenate([tokens[known], np.full(len(lost), self._unknown)]),
        )


def _edges(nodes: np.ndarray, letters: np.ndarray) -> np.ndarray:
    """Return keys of the table; they are never 0, because no node is 0."""
    return (nodes.astype(np.uint64) << np.uint64(8)) | letters.astype(np.uint64)
