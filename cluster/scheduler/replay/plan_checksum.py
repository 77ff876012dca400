"""What a log keeps of a plan: enough to notice a difference and to name its field.

The end of the chain is what the ranks check, so a log and a rank can be compared; the checksums
beside it only say where to look.
"""

from zlib import crc32

import msgspec

from worker.protocol import Plan, chain

CHAIN_BYTES = 16  # of the end of the chain

_FIELDS = Plan.__struct_fields__
_ARRAY_OF_FIELDS = bytes((0x90 | len(_FIELDS),))  # msgpack: an array of fewer than 16 elements
_encoder = msgspec.msgpack.Encoder()

assert _FIELDS[0] == "step" and len(_FIELDS) < 16, "a plan is an array that begins with its step"


class FieldChecksum(msgspec.Struct, frozen=True, array_like=True):
    """One field of a plan: how many entries it has, and the CRC-32 of its encoded form."""

    num_entries: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.num_entries} entries, checksum {self.checksum:08x}"


class PlanChecksum(msgspec.Struct, frozen=True, array_like=True):
    """One plan."""

    step: int
    chain: bytes  # the first CHAIN_BYTES of the chain's end after this plan
    fields: tuple[FieldChecksum, ...]  # of all fields but the step, in the order of `Plan`


class PlanDifference(msgspec.Struct, frozen=True):
    """The first thing in which a plan is not the one that was recorded."""

    field: str  # of Plan; "plan": there is one and should be none; "chain": what came before
    expected: str
    found: str


def checksum_plan(plan: Plan, parent: bytes) -> tuple[PlanChecksum, bytes]:
    """Return (checksum, digest): the new end of the chain is the one of `encode_plan`."""
    entries = [getattr(plan, name) for name in _FIELDS[1:]]
    parts = [_encoder.encode(part) for part in entries]
    body = b"".join((_ARRAY_OF_FIELDS, _encoder.encode(plan.step), *parts))
    digest = chain(parent, body)
    fields = tuple(
        FieldChecksum(len(entry), crc32(part)) for entry, part in zip(entries, parts, strict=True)
    )
    return PlanChecksum(plan.step, digest[:CHAIN_BYTES], fields), digest


def first_difference(
    expected: PlanChecksum | None, found: PlanChecksum | None
) -> PlanDifference | None:
    """Return the first field that differs, None if none does; None is no plan."""
    if expected == found:
        return None
    if expected is None or found is None:
        return PlanDifference("plan", _step_of(expected), _step_of(found))
    if expected.step != found.step:
        return PlanDifference("step", str(expected.step), str(found.step))
    for name, wanted, got in zip(_FIELDS[1:], expected.fields, found.fields, strict=False):
        if wanted != got:
            return PlanDifference(name, str(wanted), str(got))
    return PlanDifference("chain", expected.chain.hex(), found.chain.hex())


def _step_of(plan: PlanChecksum | None) -> str:
    return "no plan" if plan is None else f"a plan of step {plan.step}"
