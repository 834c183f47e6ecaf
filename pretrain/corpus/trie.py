"""Vectorized WordPiece for plain ASCII words: all words traverse a trie of the vocabulary, one character per step."""

import numpy as np
from tokenizers import Tokenizer

from pretrain.corpus.keytable import KeyTable

MAX_CHARACTERS = 16  # maximum characters of a word, and therefore of a token
# Root nodes of the tokens that start a word, and of the tokens that continue one ("##ing").
_START, _CONTINUATION = 1, 2


class TokenTrie:
    """The ASCII tokens of a BERT vocabulary, as a hash table from (node, character) to the next node."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        self._unknown_id = vocabulary["[UNK]"]
        tokens = [t for t in vocabulary if t.isascii() and 0 < len(t.removeprefix("##")) <= MAX_CHARACTERS]
        characters = np.array([token.removeprefix("##").encode() for token in tokens], f"S{MAX_CHARACTERS}")
        characters = characters.view(np.uint8).reshape(-1, MAX_CHARACTERS)
        nodes = np.array([_CONTINUATION if token.startswith("##") else _START for token in tokens])
        self._next, size = KeyTable(1, capacity=2 * len(tokens)), 3
        for position in range(MAX_CHARACTERS):
            active = np.flatnonzero(characters[:, position])
            children, new = self._next.find_or_insert([_edges(nodes[active], characters[active, position])], size)
            nodes[active] = children
            size += len(new[0])
        self._tokens = np.full(size, -1, np.int32)  # the token that ends at each node
        self._tokens[nodes] = [vocabulary[token] for token in tokens]

    def tokenize(self, characters: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the word index and the id of each token, by repeatedly taking the longest match in each word.

        characters: uint8 [words, 16], printable ASCII padded with zeros. If no token matches the rest of a word, the
        whole word is one [UNK]. The tokens of each word are in order; tokens of different words are interleaved.
        """
        lengths = np.count_nonzero(characters, axis=1)
        characters = np.pad(characters, ((0, 0), (0, 1)))  # a zero follows the last character, and no edge has it
        # For each unfinished word: its index, node, number of characters read, longest token so far, end of this token.
        states = np.stack([np.arange(len(characters)), *np.tile([[_START], [0], [-1], [0]], len(characters))])
        matched, unknown = [np.zeros((2, 0), np.int64)], [np.zeros(0, np.int64)]
        while states.size:
            words, nodes, positions, tokens, ends = states
            nodes[:], stuck = self._next.find([_edges(nodes, characters[words, positions])])  # stuck: no such edge
            nodes[stuck] = 0
            positions += 1
            at_token = np.flatnonzero(self._tokens[nodes] >= 0)
            tokens[at_token], ends[at_token] = self._tokens[nodes[at_token]], positions[at_token]
            if not stuck.size:
                continue
            unmatched = stuck[tokens[stuck] < 0]
            unknown.append(words[unmatched])
            matched.append(states[[[0], [3]], stuck[tokens[stuck] >= 0]])
            nodes[stuck], positions[stuck], tokens[stuck] = _CONTINUATION, ends[stuck], -1
            is_active = np.ones(len(words), bool)
            is_active[unmatched] = False
            is_active[stuck[ends[stuck] == lengths[words[stuck]]]] = False
            states = states[:, is_active]
        unmatched = np.concatenate(unknown)
        word_indices, tokens = np.concatenate(matched, axis=1)
        is_known = ~np.isin(word_indices, unmatched)
        return (
            np.concatenate([word_indices[is_known], unmatched]),
            np.concatenate([tokens[is_known], np.full(len(unmatched), self._unknown_id)]),
        )


def _edges(nodes: np.ndarray, characters: np.ndarray) -> np.ndarray:
    """Return the keys of edges in the hash table; they are never 0, because no node is 0."""
    return (nodes.astype(np.uint64) << np.uint64(8)) | characters.astype(np.uint64)
