"""Limits in the file of keys: whose they are, and which are refused."""

from hashlib import sha256
from pathlib import Path

import pytest

from cluster.errors import InvalidRequest
from cluster.router.tenancy.key_file import read_keys
from cluster.router.tenancy.principal import ANYONE
from cluster.tenancy.limits import Limits

LIMITED = """
- {key: top-secret-1, tenant: a, limits: {requests_per_minute: 5}}
- {key: top-secret-2, tenant: a, tenant_limits: {tokens_per_minute: 9, max_output_tokens: 3}}
- {key: top-secret-3, tenant: a, tenant_limits: {tokens_per_minute: 9, max_output_tokens: 3}}
- {key: top-secret-4, tenant: b, limits: {max_prompt_tokens: 2}}
"""


def test_limits_are_of_a_key_and_of_all_keys_of_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(LIMITED)
    one, two, _, other = (key.principal for key in read_keys(path))
    assert one.key_id == sha256(b"top-secret-1").hexdigest()[:12]
    assert one.counted_limits() == {
        f"key:{one.key_id}": Limits(requests_per_minute=5),
        "tenant:a": Limits(tokens_per_minute=9, max_output_tokens=3),
    }
    assert list(two.counted_limits()) == ["tenant:a"]
    assert one.max_output_tokens == two.max_output_tokens == 3
    assert other.counted_limits() == ANYONE.counted_limits() == {}
    other.check_prompt(2)
    with pytest.raises(InvalidRequest, match="has 3 tokens, and this key may send 2"):
        other.check_prompt(3)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("tenant_limits: {tokens_per_minute: 8, max_output_tokens: 3}", "'a' has already"),
        ("limits: {requests_per_minute: 0}", "greater than or equal to 1"),
        ("limits: {requests_a_minute: 1}", "requests_a_minute"),
        ("limits: {max_concurrency: 1.5}", "max_concurrency"),
        ("limits: 5", "limits"),
    ],
)
def test_limits_that_say_nothing_or_contradict_each_other_are_refused(
    tmp_path: Path, more: str, reason: str
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"{LIMITED}- {{key: top-secret-5, tenant: a, {more}}}")
    with pytest.raises(ValueError, match=reason):
        read_keys(path)
