"""worker.mixers.config: what each rank has of a mixer."""

import pytest

from worker.mixers.config import (
    GatedDeltaConfig,
    Mamba2Config,
    MixerConfig,
    ShortConvConfig,
    state_bytes,
)
from worker.spans import Span

# Granite 4.0 H 350M and 1B are of this kind; groups of 1, of Nemotron-H 8.
GRANITE = Mamba2Config(48, 32, 1, 128, 4, (0.0, float("inf")), 1e-5, True, True)
NEMOTRON = Mamba2Config(128, 64, 8, 128, 4, (0.0, float("inf")), 1e-5, True, True)
QWEN = GatedDeltaConfig(16, 128, 32, 128, 4, 1e-6)
LFM2 = ShortConvConfig(1024, 3, False)


@pytest.mark.parametrize("config", [GRANITE, NEMOTRON, QWEN, LFM2])
@pytest.mark.parametrize("tp", [1, 2, 3, 5, 8])
def test_every_input_of_the_last_product_is_one_ranks(config: MixerConfig, tp: int) -> None:
    parts = [config.part(tp, rank) for rank in range(tp)]
    columns = [part.out_columns for part in parts]
    assert columns[0].start == 0
    assert all(a.stop == b.start for a, b in zip(columns, columns[1:], strict=False))
    (whole,) = [config.part(1, 0)]
    assert columns[-1].stop == whole.out_columns.stop
    assert min(map(len, columns)) > 0
    for kind in ("in_rows", "channels"):
        held = {
            feature
            for part in parts
            for span in getattr(part, kind)
            for feature in range(span.start, span.stop)
        }
        last = getattr(whole, kind)[-1].stop
        assert held == set(range(last))


def test_a_group_is_whole_on_every_rank_that_has_heads_of_it() -> None:
    part = GRANITE.part(2, 1)
    assert part.heads == Span(24, 48)
    assert part.channels == (Span(768, 1536), Span(1536, 1664), Span(1664, 1792))
    assert part.state_shapes == ((3, 768 + 256), (24, 128, 32))
    part = NEMOTRON.part(2, 1)
    assert part.channels[1] == Span(8192 + 512, 8192 + 1024)  # four of its eight groups


def test_a_page_takes_the_bytes_of_its_states() -> None:
    assert state_bytes(LFM2, 1, 0) == 2 * 1024 * 4
    assert state_bytes(QWEN, 2, 0) == (3 * (2 * 1024 + 2048) + 16 * 128 * 128) * 4


def test_ranks_without_heads_and_norms_of_some_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="size 49 .* 48 heads in 1 groups"):
        GRANITE.part(49, 0)
    with pytest.raises(ValueError, match="norms of 8 groups"):
        NEMOTRON.part(16, 0)
    with pytest.raises(ValueError, match="size 7 .* 6 channels"):
        ShortConvConfig(6, 3, False).part(7, 0)
    assert GRANITE.shares_norm(2) and not GRANITE.shares_norm(1)
