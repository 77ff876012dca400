"""A whole random model through the product's runner, by itself, as graphs, and on two ranks."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.gpu.checks import DTYPES, error_of, expect, expect_near, expect_same
from tests.gpu.place import Place
from tests.gpu.rank_run import run_script
from tests.gpu.ranks import run_ranks
from tests.gpu.report import Case, Finding
from tests.gpu.script import Script, make_script
from worker.distributed.communicator import SingleRank

# Two layers round a dozen times where one kernel rounds once.
_GATES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}


def cases(place: Place) -> Iterator[Case]:
    for name, qk_norm in place.pick(
        [("bfloat16", False), ("float32", True)], [("bfloat16", False)]
    ):
        title = f"model {name}{' with head norms' if qk_norm else ''}"
        args = (place, DTYPES[name], qk_norm)
        yield f"{title}, eager and graphs", lambda args=args: one_rank(*args, deterministic=False)
        yield f"{title}, deterministic", lambda args=args: one_rank(*args, deterministic=True)
        yield f"{title}, TP 2 by gloo", lambda args=args: two_ranks(*args)


def one_rank(place: Place, dtype: torch.dtype, qk_norm: bool, *, deterministic: bool) -> Finding:
    """Logits near float64, and the same bits as graphs.

    Without `deterministic`, products of other numbers of rows may round otherwise, and graphs pad.
    """
    script = make_script(dtype, place.is_dry, qk_norm)
    wanted = script.wanted()
    eager = _run(place, script, deterministic, with_graphs=False)
    error = _expect_near(eager, wanted, _GATES[dtype])
    graphs = _run(place, script, deterministic, with_graphs=True)
    _expect_near(graphs, wanted, _GATES[dtype])
    decodes = [step for step in range(len(script.steps)) if script.is_decode(step)]
    expect(len(decodes) >= (1 if place.is_dry else 3), "no decodes to compare")
    most = max(len(script.steps[step]) for step in decodes)
    for step in decodes:
        if deterministic or len(script.steps[step]) == most:
            expect_same(graphs[step], eager[step], f"step {step} as a graph")
    again = _run(place, script, deterministic, with_graphs=True) if not place.is_dry else graphs
    for step, (one, other) in enumerate(zip(graphs, again, strict=True)):
        expect_same(one, other, f"step {step} again")
    _expect_adapters_matter(script, wanted, _GATES[dtype])
    return {"error": error, "gate": _GATES[dtype], "note": f"{len(wanted)} steps"}


def two_ranks(place: Place, dtype: torch.dtype, qk_norm: bool) -> Finding:
    """Two processes on one device."""
    wanted = make_script(dtype, place.is_dry, qk_norm).wanted()
    found = run_ranks(place, dtype, qk_norm, size=2)
    error = _expect_near(found, wanted, _GATES[dtype])
    return {"error": error, "gate": _GATES[dtype], "note": f"{len(wanted)} steps"}


def _run(place: Place, script: Script, deterministic: bool, with_graphs: bool) -> list[Tensor]:
    found = run_script(
        place, script, SingleRank(), deterministic=deterministic, with_graphs=with_graphs
    )
    place.tidy()
    return [logits for logits in found if logits is not None]


def _expect_near(found: Sequence[Tensor], wanted: Sequence[Tensor], gate: float) -> float:
    """Compare row by row: a wrong one must not hide among the others."""
    errors = []
    for step, (logits, reference) in enumerate(zip(found, wanted, strict=True)):
        for row in range(len(reference)):
            here = slice(row, row + 1)
            errors.append(
                expect_near(logits[here], reference[here], gate, f"step {step}, row {row}")
            )
    return max(errors)


def _expect_adapters_matter(script: Script, wanted: Sequence[Tensor], gate: float) -> None:
    """Sees that forgetting an adapter would have been noticed."""
    step = len(script.steps) - 1
    for row, (i, _, end) in enumerate(script.steps[step]):
        one = script.sequences[i]
        if one.slot is not None:
            base = script.model.logits(one.token_ids[:end], None)[-1]
            expect(error_of(base, wanted[step][row]) > 5 * gate, f"adapter of sequence {i} is idle")
