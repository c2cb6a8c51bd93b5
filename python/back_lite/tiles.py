"""The grid of tiles: its shape, the tiles that a mask allows, and the packed form of a choice.

A tile is 64 query rows by 128 key columns. ``Tm = ceil(Sq / 64)`` and ``Tn = ceil(Sk / 128)`` count
the tiles of a problem in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import check_flag, check_window

QUERY_TILE = 64
KEY_TILE = 128
TILES_PER_WORD = 32
_SIGN_BIT = 1 << 31


def grid_shape(query_length: int, key_length: int) -> tuple[int, int]:
    """Return ``(Tm, Tn)``, the numbers of query tiles and of key tiles."""
    return (query_length + QUERY_TILE - 1) // QUERY_TILE, (key_length + KEY_TILE - 1) // KEY_TILE


def tile_bits_shape(
    batch: int, num_heads: int, query_length: int, key_length: int
) -> tuple[int, int, int, int]:
    """Return ``(B, H, Tn, ceil(Tm / 32))``, the shape of the tile bits of a problem."""
    query_tiles, key_tiles = grid_shape(query_length, key_length)
    words = (query_tiles + TILES_PER_WORD - 1) // TILES_PER_WORD
    return batch, num_heads, key_tiles, words


def words_per_head(query_length: int, key_length: int) -> int:
    """Return ``Tn * ceil(Tm / 32)``, the number of words of tile bits of one head."""
    rows = QUERY_TILE * TILES_PER_WORD
    return ((key_length + KEY_TILE - 1) // KEY_TILE) * ((query_length + rows - 1) // rows)


def tile_stats_shape(query: Tensor, key: Tensor) -> tuple[int, int, int, int]:
    """Return the shape of a ``tile_stats`` buffer.

    Args:
        query: ``(B, Sq, H, D)``.
        key: ``(B, Sk, Hk, D)``.

    Returns:
        ``(B, H, Tm, Tn)``.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: an argument does not have four dimensions.
    """
    for name, tensor in (("query", query), ("key", key)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} = {type(tensor).__name__}: accepted are tensors")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name}.shape = {tuple(tensor.shape)}: accepted are four dimensions, "
                "(batch, length, heads, head_dim)"
            )
    batch, query_length, num_heads, _ = query.shape
    return batch, num_heads, *grid_shape(query_length, key.shape[1])


def mask_tiles(
    query_length: int,
    key_length: int,
    *,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    device: torch.device | str | None = None,
) -> Tensor:
    """Find the tiles in which some query sees some key.

    Args:
        query_length: Sq.
        key_length: Sk.
        causal: query i sees key j only if ``j <= i + Sk - Sq``.
        window_size: ``(left, right)``: query i sees key j only if
            ``i + Sk - Sq - left <= j <= i + Sk - Sq + right``; -1 is unlimited.
        device: where the result lives; by default torch's default device.

    Returns:
        bool ``(Tm, Tn)``.

    Raises:
        TypeError, ValueError: a length is not an int from 0, or the mask is not one of those above.
    """
    for name, length in (("query_length", query_length), ("key_length", key_length)):
        if not isinstance(length, (int, torch.SymInt)):
            raise TypeError(f"{name} = {length!r}: accepted are ints from 0")
        if length < 0:
            raise ValueError(f"{name} = {length}: accepted are ints from 0")
    check_flag("causal", causal)
    left, right = check_window(window_size)
    unlimited = query_length + key_length
    left = unlimited if left < 0 else left
    right = 0 if causal else (unlimited if right < 0 else right)
    query_tiles, key_tiles = grid_shape(query_length, key_length)
    first_row = torch.arange(query_tiles, device=device)[:, None] * QUERY_TILE
    first_key = torch.arange(key_tiles, device=device)[None, :] * KEY_TILE
    last_row = (first_row + QUERY_TILE - 1).clamp(max=query_length - 1)
    last_key = (first_key + KEY_TILE - 1).clamp(max=key_length - 1)
    # key - row takes every value between that of one corner of the tile and that of the other.
    offset = key_length - query_length
    return (first_key - last_row <= offset + right) & (last_key - first_row >= offset - left)


def pack_tiles(live: Tensor) -> Tensor:
    """Pack a choice of tiles into tile bits.

    Args:
        live: bool ``(B, H, Tm, Tn)``: True for each tile that the backward visits.

    Returns:
        int32 ``(B, H, Tn, ceil(Tm / 32))``: bit ``m % 32`` of word ``m // 32`` of column ``n``.

    Raises:
        TypeError: ``live`` is not bool.
        ValueError: ``live`` does not have four dimensions.
    """
    if live.dtype != torch.bool:
        raise TypeError(f"live.dtype = {live.dtype}: accepted is torch.bool")
    if live.dim() != 4:
        raise ValueError(f"live.shape = {tuple(live.shape)}: accepted is (B, H, Tm, Tn)")
    columns = live.transpose(2, 3)
    words = (columns.shape[3] + TILES_PER_WORD - 1) // TILES_PER_WORD
    padding = words * TILES_PER_WORD - columns.shape[3]
    columns = torch.nn.functional.pad(columns.to(torch.int64), (0, padding))
    bit = torch.arange(TILES_PER_WORD, device=live.device)
    unsigned = (columns.reshape(*columns.shape[:3], words, TILES_PER_WORD) << bit).sum(4)
    return ((unsigned ^ _SIGN_BIT) - _SIGN_BIT).to(torch.int32)


def unpack_tiles(bits: Tensor, num_query_tiles: int) -> Tensor:
    """Unpack tile bits; the inverse of :func:`pack_tiles`.

    Args:
        bits: int32 ``(B, H, Tn, ceil(Tm / 32))``.
        num_query_tiles: Tm.

    Returns:
        bool ``(B, H, Tm, Tn)``.

    Raises:
        TypeError: ``bits`` is not int32.
        ValueError: the shape of ``bits`` does not fit ``num_query_tiles``.
    """
    if bits.dtype != torch.int32:
        raise TypeError(f"bits.dtype = {bits.dtype}: accepted is torch.int32")
    words = (num_query_tiles + TILES_PER_WORD - 1) // TILES_PER_WORD
    if bits.dim() != 4 or bits.shape[3] != words:
        raise ValueError(
            f"bits.shape = {tuple(bits.shape)}: accepted is (B, H, Tn, {words}) for "
            f"num_query_tiles = {num_query_tiles}"
        )
    bit = torch.arange(TILES_PER_WORD, device=bits.device, dtype=torch.int32)
    columns = ((bits[..., None] >> bit) & 1).flatten(3)[..., :num_query_tiles]
    return columns.transpose(2, 3).to(torch.bool)


def count_live(bits: Tensor) -> int:
    """Count the live tiles in tile bits of any shape."""
    return int(_count_bits(bits).sum(dtype=torch.int64))


def count_live_by_head(bits: Tensor) -> Tensor:
    """Count the live tiles of each head in tile bits ``(B, H, ...)``: int64 ``(H,)``."""
    return _count_bits(bits).transpose(0, 1).flatten(1).sum(dim=1, dtype=torch.int64)


def _count_bits(bits: Tensor) -> Tensor:
    """Number of bits set in each byte: uint8, the last dimension four times as long."""
    byte = bits.contiguous().view(torch.uint8)
    pairs = byte - ((byte >> 1) & 0x55)
    nibbles = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (nibbles + (nibbles >> 4)) & 0x0F
