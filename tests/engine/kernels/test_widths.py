"""Sizes that do not belong together are refused before anything is read or written."""

from collections.abc import Callable

import pytest
import torch

from engine.attention import absorb_reference
from engine.attention.paged_queries import PagedQueries
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels import reference
from engine.kernels.alignment import Alignment
from engine.kernels.masked_rows import MaskedPlaces, empty_masked
from engine.kernels.rotation import Rotation
from engine.kernels.widths import check_latents, check_permute, check_queries, check_unpermute
from engine.ops.latents import SPLIT_LATENTS, STORE_LATENTS
from engine.ops.masked import MOE_ALIGN_MASKED
from engine.ops.permute import COUNT_ROWS, MOE_ALIGN_BLOCK_SIZE, UNPERMUTE_ROWS
from runtime.errors import InternalError

TOKENS, RANK, ROPE = 3, 128, 8
ROWS = PagedQueries(block_tables_SB=torch.zeros(1, 1), seq_lens_S=torch.ones(1))


def rotation(num_tokens: int = TOKENS, half: int = ROPE // 2) -> Rotation:
    return Rotation(cos=torch.ones(num_tokens, half), sin=torch.zeros(num_tokens, half))


def store(width: int = RANK + ROPE, layer: int = RANK + ROPE, slots: int = TOKENS) -> None:
    STORE_LATENTS.reference(
        torch.randn(TOKENS, width), torch.ones(RANK), 1e-6, rotation(),
        cache=torch.zeros(2, 4, layer), slots_T=torch.arange(slots),
    )  # fmt: skip


def split(width: int) -> None:
    SPLIT_LATENTS.reference(
        torch.randn(TOKENS, width), torch.ones(256), torch.ones(RANK), 1e-6, rotation(),
        cache=torch.zeros(2, 4, RANK + ROPE), slots_T=torch.arange(TOKENS),
    )  # fmt: skip


def test_latents_that_fit_are_taken() -> None:
    store()
    split(256 + RANK + ROPE)


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (lambda: store(width=RANK + ROPE + 1), r"\(137, 136\) was given; widths of 136"),
        (lambda: store(layer=RANK), r"\(136, 128\) was given"),
        (lambda: store(slots=TOKENS - 1), r"slots of latents: \(2,\).* each of 3 tokens"),
        (lambda: split(256 + RANK), r"\(128, 136\) was given"),
    ],
)
def test_latents_of_other_widths_are_refused(run: Callable[[], None], named: str) -> None:
    with pytest.raises(InternalError, match=named):
        run()


def test_angles_of_other_tokens_are_refused() -> None:
    latents, cache = torch.randn(TOKENS, RANK + ROPE), torch.zeros(2, 4, RANK + ROPE)
    strided = rotation(2 * TOKENS)
    for given in (
        rotation(TOKENS + 1),
        Rotation(cos=rotation().cos, sin=rotation(half=3).sin),
        Rotation(cos=strided.cos[::2], sin=strided.sin[::2]),
    ):
        with pytest.raises(InternalError, match="rotation"):
            check_latents(latents, RANK, given, cache=cache, slots_T=torch.arange(TOKENS))


@pytest.mark.parametrize("shape", [(2, 16 + ROPE), (3, 16 + ROPE + 2), (3, 16)])
def test_queries_of_other_widths_are_refused(shape: tuple[int, int]) -> None:
    weight = torch.randn(3, 16, RANK)
    check_queries(torch.randn(TOKENS, 3, 16 + ROPE), weight, rotation())
    with pytest.raises(InternalError, match="3 heads of 16 numbers and 8 rotated are wanted"):
        absorb_reference.absorb_queries(
            torch.randn(TOKENS, *shape), weight, rotation(), torch.empty(0), ROWS
        )


@pytest.mark.parametrize("shape", [(2, RANK), (3, RANK - 1)])
def test_values_of_other_widths_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(InternalError, match="3 heads of 128 numbers are wanted"):
        absorb_reference.expand_values(
            torch.randn(TOKENS, *shape), torch.randn(3, 128, RANK), ROWS, fp8=False
        )


def places_of(kind: str) -> Alignment | MaskedPlaces:
    ids = torch.tensor([[0, 1], [1, -1], [0, 2]])
    if kind == "aligned":
        return MOE_ALIGN_BLOCK_SIZE.reference(ids, 0, 3)
    return MOE_ALIGN_MASKED.reference(ids, 0, 3, 128)


@pytest.mark.parametrize("kind", ["aligned", "masked"])
def test_rows_are_summed_from_as_many_as_were_laid_out(kind: str) -> None:
    places = places_of(kind)
    num_rows = places.num_rows
    assert num_rows == (4 if kind == "aligned" else 3) * 128
    source, weights = torch.randn(num_rows, 16), torch.ones(TOKENS, 2)
    check_unpermute(source, places, weights, torch.ones(TOKENS, 16))
    for other in (source[:-1], torch.randn(num_rows, 32)[:, :16]):
        with pytest.raises(InternalError, match=f"{num_rows} contiguous rows are wanted"):
            UNPERMUTE_ROWS.reference(other, places, weights, None)
    with pytest.raises(InternalError, match=r"weights: \(3, 1\)"):
        UNPERMUTE_ROWS.reference(source, places, weights[:, :1], None)
    with pytest.raises(InternalError, match="own term"):
        UNPERMUTE_ROWS.reference(source, places, weights, torch.ones(TOKENS, 15))


def test_rows_are_spread_over_room_of_their_width() -> None:
    rows, places = reference.quantize_rows(torch.randn(TOKENS, 256)), places_of("masked").rows_TK
    data, scale = empty_masked(3, 128, 256, torch.device("cpu"))
    check_permute(data, scale, rows, places)
    narrow = empty_masked(3, 128, 128, torch.device("cpu"))
    few = empty_masked(3, 64, 256, torch.device("cpu"))
    for room, tokens in (
        (narrow, places), ((data, few[1]), places), ((data, scale), places[:2]),
        ((data, scale.contiguous()), places), ((data[:, :, ::2], narrow[1]), places),
    ):  # fmt: skip
        with pytest.raises(InternalError, match="wanted"):
            check_permute(*room, rows, tokens)


def test_formats_have_whole_groups() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(InternalError, match="columns: 100 was given; a multiple of 128"):
        Fp8Rows.empty(3, 100, cpu)
    with pytest.raises(InternalError, match="rows of 144 bytes are wanted"):
        Fp8Rows.packed(torch.zeros(3, 128, dtype=torch.uint8), 128)
    with pytest.raises(InternalError, match="multiples of 4 and of 128"):
        empty_masked(2, 126, 128, cpu)


def test_places_fit_what_is_laid_out() -> None:
    counts = COUNT_ROWS.reference(torch.tensor([[0], [1]]), 0, 2)
    for num_rows in (100, 384):
        with pytest.raises(InternalError, match="a multiple of 128 up to 256 is wanted"):
            counts.lay_out(num_rows)
    with pytest.raises(InternalError, match="tokens: 5 was given; there is room for 4"):
        MOE_ALIGN_MASKED.reference(torch.zeros(5, 1, dtype=torch.int64), 0, 2, 4)
