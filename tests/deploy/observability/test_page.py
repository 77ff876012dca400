"""The page of metrics is in step with the code, and says what each of them means."""

from cluster.router.metrics.exposition import Families
from deploy.observability.page import FILE, page
from deploy.observability.sample import sample_view


def test_the_file_is_what_the_code_makes() -> None:
    assert FILE.read_text() == page(), "run: python -m deploy.observability.page"


def test_every_family_is_on_the_page_once() -> None:
    text = page()
    for family in Families(sample_view()).collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert text.count(f"\n| `{name}` |") == 1, name
        assert family.documentation.endswith("."), name


def test_there_is_no_second_family_of_a_name() -> None:
    names = [family.name for family in Families(sample_view()).collect()]
    assert len(names) == len(set(names))
