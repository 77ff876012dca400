"""What may be fetched is what a prefix covers, and nothing that could be read in two ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.adapters.sources.allow_list import Address, AllowList
from cluster.errors import InvalidRequest

LIST = AllowList(
    ["hf://my-org", "s3://bucket/adapters/", "https://files.example.com/a", "http://10.0.0.1:8080/"]
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hf://my-org/law@v1.0", Address("hf", "my-org/law", "v1.0")),
        ("hf://my-org/law@refs/pr/1", Address("hf", "my-org/law", "refs/pr/1")),
        ("hf://my-org/law", Address("hf", "my-org/law")),
        ("hf://my-org/law/checkpoint-5@main", Address("hf", "my-org/law/checkpoint-5", "main")),
        ("my-org/law@main", Address("hf", "my-org/law", "main")),
        ("my-org/law", Address("hf", "my-org/law")),
        ("s3://bucket/adapters/law/7", Address("s3", "bucket/adapters/law/7")),
        ("s3://bucket/adapters", Address("s3", "bucket/adapters")),
        ("HTTPS://Files.Example.com:443/a/law/", Address("https", "files.example.com/a/law")),
        ("http://10.0.0.1:8080/law", Address("http", "10.0.0.1:8080/law")),
    ],
)
def test_what_a_prefix_covers_may_be_fetched(text: str, address: Address) -> None:
    assert LIST.address(text) == address
    if "://" in text:
        assert LIST.address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "hf://my-organisation/law",
        "hf://other/law",
        "s3://bucket/adapters-of-others/law",
        "s3://bucket2/adapters/law",
        "s3://bucket",
        "https://files.example.com/ab",
        "https://files.example.com:8443/a",
        "https://files.example.com.evil.org/a",
        "http://files.example.com/a",
        "http://10.0.0.1/law",
        "gs://bucket/adapters/law",
    ],
)
def test_what_no_prefix_covers_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="adapter_sources"):
        LIST.address(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://files.example.com/a/../secret",
        "https://files.example.com/a/./b",
        "https://files.example.com/a//b",
        "https://files.example.com/a/%2e%2e/secret",
        "https://files.example.com/a/..%2fsecret",
        "https://files.example.com/a\\b",
        "https://files.example.com/a?x=1",
        "https://files.example.com/a#x",
        "https://files.example.com@evil.org/a",
        "https://user:word@files.example.com/a",
        "https://files.example.com\x00.evil.org/a",
        "https://files.example.com/a\r\nHost: evil.org",
        "https:///a",
        "https://files.example.com:0/a",
        "https://files..example.com/a",
        "https://ﬁles.example.com/a",
        "s3://bucket/adapters/../secret",
        "s3://bucket/adapters/.hidden",
        "s3://key:secret@bucket/adapters",
        "simplecache::s3://bucket/adapters",
        "hf://my-org",
        "hf://my-org/law@../main",
        "hf://my-org/../other/law",
        "hf://my-org/law@",
        "hf://datasets/my-org/law@a@b",
        "file:///etc",
        "ftp://files.example.com/a",
        "memory://a/b",
        "https://files.example.com/" + "a" * 3000,
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(text: str) -> None:
    try:
        address = LIST.address(text)
    except InvalidRequest as error:
        assert error.param == "lora_path" and len(error.message) < 600
    else:
        assert address is None and "::" in text  # a path on this host, which is not there


@pytest.mark.parametrize("text", ["/adapters/law", "./my-org/law", "my-org/law/x", "law", "a/b"])
def test_everything_else_is_a_path_on_this_host(text: str) -> None:
    assert LIST.address(text) is None
    assert AllowList([]).address("my-org/law") is None


def test_an_empty_list_allows_nothing() -> None:
    with pytest.raises(InvalidRequest, match="adapter_sources"):
        AllowList([]).address("hf://my-org/law")


def test_a_whole_hub_may_be_allowed_but_not_all_hosts_or_buckets() -> None:
    assert AllowList(["hf://"]).address("any/one") == Address("hf", "any/one")
    for text in ("https://", "s3://", "https:///a", "my-org", "file:///", "*", "https://*", ""):
        with pytest.raises(ValueError):
            AllowList([text])


@given(st.text(alphabet="abc./@%:\\?#~\x00 é[]-", max_size=30))
def test_whatever_is_let_through_lies_under_a_prefix(rest: str) -> None:
    for scheme in ("https", "s3", "hf"):
        try:
            address = LIST.address(f"{scheme}://{rest}")
        except InvalidRequest:
            continue
        assert address is not None
        whole = f"{address.scheme}://{address.path}/"
        assert whole.startswith(
            ("hf://my-org/", "s3://bucket/adapters/", "https://files.example.com/a/")
        )
        assert ".." not in address.path.split("/")
