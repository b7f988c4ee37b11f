"""The key-value cache of a rollout: allocated ahead, one slot per row, all rows aligned at their newest token.

R slots, k key-value heads, D head size. The newest token of every row stands in the same column, so that a decode step
writes one column and reads one block; a row that entered later starts further right, and its first columns are hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from grupo.models.memory import LayerWidths

GROWTH = 1.5
SPARE_COLUMNS = 64


def cache_columns(prompt: int, completion: int, *, refills: bool) -> int:
    """Columns that the cache of completions of full length has in the end.

    Args:
        prompt, completion: tokens of a prompt and of a completion.
        refills: whether rows enter while others are being decoded: those begin further right.
    """
    needed = prompt + completion - 1 + (SPARE_COLUMNS if refills else 0)
    columns = prompt + SPARE_COLUMNS
    while columns < needed:
        columns = _grown(columns)
    return columns


def cache_bytes(tokens: int, widths: LayerWidths, *, itemsize: int) -> int:
    """Memory of the keys and values of `tokens` tokens in all layers."""
    return tokens * widths.cached * itemsize


def _grown(columns: int) -> int:
    return max(columns + 1, int(columns * GROWTH))


class AlignedKVCache(Cache):
    """The cache of the rows that are being decoded, of all layers.

    Args:
        prompt: keys and values of one layer after the other, (1, k, P, D) each: what the sizes are taken from.
        slots: most rows at once.
    """

    def __init__(self, prompt: Sequence[tuple[Tensor, Tensor]], slots: int) -> None:
        self.rows: list[_AlignedLayer] = [_AlignedLayer(key, value, slots) for key, value in prompt]
        super().__init__(layers=list(self.rows))
        self.slots = slots
        self.first: list[int] = []
        """Of each row in use: the column of its first token."""
        self.column = 0
        """Columns written so far: the next token's column."""

    @property
    def oldest(self) -> int:
        """First column that any row uses."""
        return min(self.first, default=self.column)

    def enter(self, prompt: Sequence[tuple[Tensor, Tensor]], count: int) -> None:
        """Appends `count` rows that all start with one prompt."""
        length = prompt[0][0].shape[2]
        if not self.first:
            self.column = 0
        if length > self.column:
            self._shift(length - self.column)
        start, stop = len(self.first), len(self.first) + count
        first, oldest = self.column - length, self.oldest
        for layer, (key, value) in zip(self.rows, prompt, strict=True):
            layer.reserve(self.column + 1, used=self.column, rows=start)
            for tensor, states in ((layer.keys, key), (layer.values, value)):
                tensor[start:stop, :, first : self.column] = states
                # Hidden columns are multiplied by a share of zero: they may hold anything but NaN and infinity.
                tensor[start:stop, :, oldest:first] = 0
                tensor[:start, :, first:oldest] = 0
        self.first.extend([first] * count)

    def keep(self, order: Sequence[int]) -> None:
        """Keeps the rows `order`, in this order; a row that stays where it is costs nothing."""
        used = slice(self.oldest, self.column)
        for place, row in enumerate(order):
            if place != row:
                for layer in self.rows:
                    layer.keys[place, :, used] = layer.keys[row, :, used]
                    layer.values[place, :, used] = layer.values[row, :, used]
        self.first = [self.first[row] for row in order]

    def advance(self) -> None:
        """Makes room for the next token of every row."""
        if self.oldest >= SPARE_COLUMNS:
            self._shift(-self.oldest)
        oldest = self.oldest
        for layer in self.rows:
            layer.reserve(self.column + 1, used=self.column, rows=len(self.first))
            layer.active, layer.oldest, layer.column = len(self.first), oldest, self.column
        self.column += 1

    def _shift(self, columns: int) -> None:
        """Moves all rows to the right, or to the left over columns that no row uses any more."""
        rows, before, oldest = len(self.first), self.column, self.oldest
        self.column += columns
        for layer in self.rows:
            layer.reserve(self.column + 1, used=before, rows=rows)
            for tensor in (layer.keys, layer.values):
                tensor[:rows, :, oldest + columns : self.column] = tensor[:rows, :, oldest:before].clone()
        self.first = [first + columns for first in self.first]


class _AlignedLayer(CacheLayerMixin):
    """One layer: (R, k, columns, D) keys and values."""

    is_sliding = False
    # The base class allows None, before it is initialised.
    keys: Tensor
    values: Tensor

    def __init__(self, key: Tensor, value: Tensor, slots: int) -> None:
        super().__init__()
        capacity = key.shape[2] + SPARE_COLUMNS
        self.keys = key.new_empty(slots, key.shape[1], capacity, key.shape[3])
        self.values = value.new_empty(slots, value.shape[1], capacity, value.shape[3])
        self.is_initialized = True
        self.active = self.oldest = self.column = 0

    def reserve(self, columns: int, *, used: int, rows: int) -> None:
        """Grows so far that `columns` fit; the first `used` of the first `rows` rows are kept."""
        if columns <= self.keys.shape[2]:
            return
        capacity = max(columns, _grown(self.keys.shape[2]))
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(old.shape[0], old.shape[1], capacity, old.shape[3])
            new[:rows, :, :used] = old[:rows, :, :used]
            setattr(self, name, new)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("allocated from the start")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **keywords: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one token of every row; returns the columns in use."""
        rows, oldest, column = self.active, self.oldest, self.column
        self.keys[:rows, :, column] = key_states[:, :, 0]
        self.values[:rows, :, column] = value_states[:, :, 0]
        return self.keys[:rows, :, oldest : column + 1], self.values[:rows, :, oldest : column + 1]

    def get_seq_length(self) -> int:
        return self.column

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.column + query_length, 0

    def get_max_length(self) -> int:
        return -1
