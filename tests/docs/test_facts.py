"""Facts that documents state and code decides: models, parameters, bounds, what restarts."""

import re
from typing import get_args

import pytest

from cluster.api.schemas.requests import (
    HARMLESS,
    NEUTRAL_VALUES,
    ChatBody,
    CompletionBody,
)
from cluster.errors import BY_NAME
from cluster.router.tenancy.key_file import KeyEntry
from cluster.router.tenancy.oidc.rules import TokenRule
from cluster.router.tenancy.principal import SCOPES
from cluster.scheduler.config import SchedulerConfig
from cluster.tenancy.limits import Limits
from deploy.config import ServeConfig
from deploy.serving.redeploy_scope import LIVE_KEYS, POOL_KEYS, ROUTER_KEYS, SCHEDULER_KEYS
from tests.docs.pages import ROOT, rows, spans
from worker.model_config import RopeConfig
from worker.models.config_file import DTYPES
from worker.models.registry import all_families

README = (ROOT / "README.md").read_text()
API = (ROOT / "docs" / "api.md").read_text()
MODELS = (ROOT / "docs" / "models.md").read_text()
ADAPTERS = (ROOT / "docs" / "adapters.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
SECURITY = (ROOT / "docs" / "security.md").read_text()
SUPPORTED = {row[0]: row[1] for row in rows(README, "Supported and not supported")}


def names(text: str) -> set[str]:
    return set(spans(text))


def first_cells(page: str, heading: str) -> set[str]:
    return {name for row in rows(page, heading) for name in names(row[0])}


def test_the_models_are_those_that_the_reader_takes() -> None:
    told = [tuple(names(cell) for cell in row[:3]) for row in rows(MODELS, "Served")]
    for one in all_families():
        told.remove(
            ({one.name}, {one.causal_lm, one.multimodal} - {None}, {one.classifier} - {None})
        )
    assert not told
    kinds = get_args(RopeConfig.__dataclass_fields__["kind"].type)
    assert names(SUPPORTED["rope types"]) - {"config.json"} == set(kinds)
    assert names(SUPPORTED["weights"].partition(";")[0]) == set(DTYPES)
    computed = get_args(ServeConfig.model_fields["dtype"].annotation)
    methods = get_args(get_args(ServeConfig.model_fields["quantization"].annotation)[0])
    flags = {"--dtype", "--quantization"}
    assert names(SUPPORTED["weights"].partition(";")[2]) == {*computed, *methods, *flags}
    assert first_cells(MODELS, "Fewer bits") == set(methods)


def test_the_family_that_is_added_as_an_example_is_as_its_files_are() -> None:
    diff = MODELS.partition("```diff\n")[2].partition("```")[0]
    shown = dict.fromkeys(re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE), "")
    assert len(shown) == 2
    for path, part in zip(shown, re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:], strict=True):
        added = part.partition("--- ")[0].splitlines()
        assert "".join(f"{line[1:]}\n" for line in added) == (ROOT / path).read_text()


def test_the_parameters_are_the_fields_of_the_bodies() -> None:
    table = first_cells(API, "Parameters of chats and completions")
    assert table == {*ChatBody.model_fields, *CompletionBody.model_fields}


def test_what_has_no_effect_is_said_to_have_none() -> None:
    sentence = API.partition("Accepted, without effect on the answer:")[2].partition(".\n")[0]
    assert names(sentence) == HARMLESS


def test_what_is_said_to_be_refused_is_refused_by_name() -> None:
    refused = first_cells(API, "Refused, and why")
    parameters = {name.partition(":")[0] for name in refused} - {"image_url"}
    assert len(parameters) > 20 and parameters <= set(NEUTRAL_VALUES)


def test_every_error_has_its_status_in_the_table() -> None:
    table = {int(number) for row in rows(API, "Errors") for number in re.findall(r"\d+", row[0])}
    assert table == {error.status for error in BY_NAME.values()}


def test_the_fields_and_scopes_of_keys_and_rules_for_tokens_are_all_described() -> None:
    tables = first_cells(SECURITY, "Keys")
    fields = {*KeyEntry.model_fields, *TokenRule.model_fields}
    assert {*tables, "key", "key_sha256"} == fields | SCOPES


def test_the_limits_of_keys_are_all_described() -> None:
    assert first_cells(SECURITY, "Limits") == set(Limits.model_fields)


@pytest.mark.parametrize(
    ("row", "context", "num_unpinned_slots", "is_crowded"),
    [(0, 131_072, 2, False), (0, 131_072, 8, False), (1, 131_072, 1, False)]
    + [(1, 8192, 1, False), (2, 131_072, 8, True)],
)
def test_the_bounds_on_the_wait_for_a_slot_are_those_that_the_scheduler_computes(
    row: int, context: int, num_unpinned_slots: int, is_crowded: bool
) -> None:
    config = SchedulerConfig(
        base_digest="", num_pages=context // 64, page_size=64, max_model_len=context
    )
    bound = config.slot_wait_bound(1, num_unpinned_slots, is_crowded=is_crowded)
    said = rows(ADAPTERS, "The bound on waiting for a slot")[row][2]
    assert bound in {int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", said)}


def test_the_readme_names_the_bound_of_eight_unpinned_slots() -> None:
    config = SchedulerConfig(base_digest="", num_pages=2048, page_size=64, max_model_len=131_072)
    assert f"within {config.slot_wait_bound(1, 8)} steps" in " ".join(README.split())


def test_each_row_of_what_a_change_restarts_has_keys_that_restart_the_same() -> None:
    table = [names(row[0]) for row in rows(OPERATIONS, "A Ray cluster")]
    scopes = [{tuple(key in scope for scope in _SCOPES) for key in row} for row in table]
    assert all(len(scope) == 1 for scope in scopes), "keys of one row restart different things"
    named = set().union(*table)
    own = {"host", "port", "ray_address"}  # Serve's, or of no meaning there
    unnamed = set(ServeConfig.model_fields) - named - own
    assert unnamed <= SCHEDULER_KEYS - ROUTER_KEYS - POOL_KEYS, "they are no schedulers' alone"


_SCOPES = (ROUTER_KEYS, POOL_KEYS, SCHEDULER_KEYS, LIVE_KEYS)
