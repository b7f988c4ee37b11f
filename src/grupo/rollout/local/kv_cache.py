"""The key-value cache of a rollout: preallocated, one slot per row, all rows aligned at their newest token.

R slots, k key-value heads, D head size. The newest token of every row stands in the same column, so that a decode step
writes one column and reads one block; a row that was added later starts further right, and its first columns are
masked.
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
    """Keys and values of the rows that are being decoded, in all layers.

    Args:
        prompt: keys and values of each layer, (1, k, P, D); they give the sizes.
        slots: most rows at the same time.
    """

    def __init__(self, prompt: Sequence[tuple[Tensor, Tensor]], slots: int) -> None:
        self.rows: list[_AlignedLayer] = [_AlignedLayer(key, value, slots) for key, value in prompt]
        super().__init__(layers=list(self.rows))
        self.slots = slots
        self.row_start: list[int] = []
        """First column of each active row."""
        self.next_column = 0
        """Column of the next token."""

    @property
    def min_start(self) -> int:
        """First column that any active row uses."""
        return min(self.row_start, default=self.next_column)

    def add_rows(self, prompt: Sequence[tuple[Tensor, Tensor]], count: int) -> None:
        """Appends `count` rows that start with the same prompt."""
        length = prompt[0][0].shape[2]
        if not self.row_start:
            self.next_column = 0
        if length > self.next_column:
            self._shift(length - self.next_column)
        start, stop = len(self.row_start), len(self.row_start) + count
        first, oldest = self.next_column - length, self.min_start
        for layer, (key, value) in zip(self.rows, prompt, strict=True):
            layer.reserve(self.next_column + 1, used=self.next_column, rows=start)
            for tensor, states in ((layer.keys, key), (layer.values, value)):
                tensor[start:stop, :, first : self.next_column] = states
                # Masked columns get a probability of zero: they may hold anything but NaN and infinity.
                tensor[start:stop, :, oldest:first] = 0
                tensor[:start, :, first:oldest] = 0
        self.row_start.extend([first] * count)

    def reorder_rows(self, order: Sequence[int]) -> None:
        """Keeps the rows `order`, in this order; a row that keeps its index costs nothing."""
        used = slice(self.min_start, self.next_column)
        for place, row in enumerate(order):
            if place != row:
                for layer in self.rows:
                    layer.keys[place, :, used] = layer.keys[row, :, used]
                    layer.values[place, :, used] = layer.values[row, :, used]
        self.row_start = [self.row_start[row] for row in order]

    def advance(self) -> None:
        """Makes room for the next token of each row."""
        if self.min_start >= SPARE_COLUMNS:
            self._shift(-self.min_start)
        oldest = self.min_start
        for layer in self.rows:
            layer.reserve(self.next_column + 1, used=self.next_column, rows=len(self.row_start))
            layer.active, layer.min_start, layer.next_column = len(self.row_start), oldest, self.next_column
        self.next_column += 1

    def _shift(self, columns: int) -> None:
        """Shifts all rows to the right, or to the left over columns that no row uses any more."""
        rows, before, oldest = len(self.row_start), self.next_column, self.min_start
        self.next_column += columns
        for layer in self.rows:
            layer.reserve(self.next_column + 1, used=before, rows=rows)
            for tensor in (layer.keys, layer.values):
                tensor[:rows, :, oldest + columns : self.next_column] = tensor[:rows, :, oldest:before].clone()
        self.row_start = [first + columns for first in self.row_start]


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
        self.active = self.min_start = self.next_column = 0

    def reserve(self, columns: int, *, used: int, rows: int) -> None:
        """Grows to at least `columns` columns; the first `used` columns of the first `rows` rows are kept."""
        if columns <= self.keys.shape[2]:
            return
        capacity = max(columns, _grown(self.keys.shape[2]))
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(old.shape[0], old.shape[1], capacity, old.shape[3])
            new[:rows, :, :used] = old[:rows, :, :used]
            setattr(self, name, new)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("allocated by the constructor")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **keywords: object
    ) -> tuple[Tensor, Tensor]:
        """Writes one token of each row; returns the columns in use."""
        rows, oldest, column = self.active, self.min_start, self.next_column
        self.keys[:rows, :, column] = key_states[:, :, 0]
        self.values[:rows, :, column] = value_states[:, :, 0]
        return self.keys[:rows, :, oldest : column + 1], self.values[:rows, :, oldest : column + 1]

    def get_seq_length(self) -> int:
        return self.next_column

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.next_column + query_length, 0

    def get_max_length(self) -> int:
        return -1
