"""The page of compatibility is what the code says, and says of everything why it is not served."""

from collections.abc import Iterator

import pytest

from cluster.api.responses.body import FOREIGN, ResponseBody
from cluster.api.schemas.requests import Body
from cluster.errors import InvalidRequest
from tests.compat.page import FILE, bodies, page, verdict
from tests.compat.peers import PARAMETERS, ROUTES
from tests.compat.peers import WHY_NOT as WHY_NO_ROUTE

BODIES = bodies()


def parameters() -> Iterator[tuple[type[Body], str]]:
    for path, peers in PARAMETERS.items():
        for name in sorted({name for names in peers.values() for name in names}):
            yield BODIES[f"POST {path}"], name


CASES = sorted(set(parameters()), key=lambda case: (case[0].__name__, case[1]))


def refused(body: type[Body], name: str, value: object) -> bool:
    """Return whether a body with this value of a parameter is refused for it."""
    sent = body.model_construct(**{name: value})
    try:
        if body is ResponseBody and name in FOREIGN:
            sent._check_foreign()
        else:
            sent.refuse_extras()
    except InvalidRequest as error:
        assert error.param == name
        return True
    return False


def test_the_page_is_in_step() -> None:
    assert FILE.read_text() == page(), "write it anew: python -m tests.compat.page"


@pytest.mark.parametrize(("body", "name"), CASES)
def test_a_parameter_is_refused_where_the_page_says_so_and_with_a_reason(
    body: type[Body], name: str
) -> None:
    what, why, _ = verdict(body, name)
    assert refused(body, name, ["something"]) == (what == "refused")
    assert not refused(body, name, None)
    assert bool(why) == (what == "refused")


def test_every_route_of_another_server_is_served_or_has_a_reason() -> None:
    missing = ROUTES.keys() - BODIES.keys()
    assert missing == WHY_NO_ROUTE.keys()
    assert len(ROUTES) - len(missing) > 30
