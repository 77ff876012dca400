"""The shape of one namespace's tree."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.kv_cache.radix_tree import Numbers, PageKey, RadixTree, namespace


def tree_of_letters(*words: str) -> RadixTree:
    """A tree with one page for each letter, numbered in order of insertion."""
    tree = RadixTree(namespace("m", "base", ""), Numbers())
    pages = count()
    for word in words:
        keys = keys_of(word)
        tree.extend(tree.root, keys, [next(pages) for _ in keys])
    return tree


def keys_of(word: str) -> list[PageKey]:
    return [(ord(letter),) for letter in word]


def test_a_prefix_is_found_up_to_the_first_page_that_differs() -> None:
    tree = tree_of_letters("abcd")
    assert tree.match(keys_of("abxd")).pages == (0, 1)
    assert tree.match(keys_of("abcdef")).pages == (0, 1, 2, 3)
    assert tree.match(keys_of("x")).pages == ()
    assert tree.match([]).pages == ()


def test_two_words_share_the_node_of_their_common_start() -> None:
    tree = tree_of_letters("abcd", "abxy")
    assert tree.match(keys_of("abcd")).pages == (0, 1, 2, 3)
    assert tree.match(keys_of("abxy")).pages == (0, 1, 6, 7)
    assert ["".join(chr(k[0]) for k in n.keys) for n in tree.nodes()] == ["ab", "cd", "xy"]


def test_pages_that_the_tree_has_stay_and_the_rest_is_taken() -> None:
    tree = tree_of_letters("abc")
    end, num_known = tree.extend(tree.root, keys_of("abcde"), [10, 11, 12, 13, 14])
    assert (num_known, end.pages) == (3, [13, 14])
    end, num_known = tree.extend(tree.root, keys_of("ab"), [20, 21])
    assert (num_known, end.pages) == (2, [0, 1])


def test_whoever_holds_the_lower_part_of_a_split_node_holds_the_same_prefix() -> None:
    tree = tree_of_letters("abcd")
    held = tree.match(keys_of("abcd")).node
    assert held is not None
    held.locks = 3
    upper = tree.split(held, 1)
    assert [node.pages for node in held.path()] == [[1, 2, 3], [0], []]
    assert upper.locks == 3


def test_a_leaf_loses_its_last_pages_first_and_goes_with_its_first() -> None:
    tree = tree_of_letters("abcd")
    leaf = tree.match(keys_of("abcd")).node
    assert leaf is not None
    assert tree.trim(leaf, 1) == [3]
    assert tree.match(keys_of("abcd")).pages == (0, 1, 2)
    assert tree.trim(leaf, 3) == [0, 1, 2]
    assert not tree.root.children


def test_a_node_with_suffixes_cannot_be_trimmed() -> None:
    tree = tree_of_letters("ab", "ac")
    parent = tree.match(keys_of("a")).node
    assert parent is not None
    with pytest.raises(AssertionError, match="only a leaf"):
        tree.trim(parent, 1)


def test_a_split_of_a_long_run_copies_nothing() -> None:
    tree = tree_of_letters("abcdefgh")
    lower = tree.match(keys_of("abcdefgh")).node
    assert lower is not None
    run = lower.run
    upper = tree.split(lower, 5)
    assert upper.run is lower.run is run
    assert (upper.keys, lower.keys) == (keys_of("abcde"), keys_of("fgh"))
    assert tree.trim(lower, 3) == [5, 6, 7]
    assert (run.keys, run.pages) == (keys_of("abcde"), [0, 1, 2, 3, 4])
    assert (upper.children, upper.num_device_children) == ({}, 0)


def test_a_match_tells_the_pages_on_the_device_and_counts_those_behind_them() -> None:
    tree = tree_of_letters("abcdef")
    node = tree.match(keys_of("abcdef")).node
    assert node is not None
    saved, pages = tree.sink(node, [100, 101])
    assert (saved.pages, pages) == ([100, 101], [4, 5])
    match = tree.match(keys_of("abcdex"))
    assert (match.pages, match.num_host_pages, match.num_node_pages) == ((0, 1, 2, 3), 1, 1)
    assert match.node is saved
    assert saved.parent is not None and saved.parent.num_device_children == 0


def test_a_saved_end_joins_what_was_saved_of_the_same_run() -> None:
    tree = tree_of_letters("abcdef")
    node = tree.match(keys_of("abcdef")).node
    assert node is not None
    saved, _ = tree.sink(node, [101])
    (rest,) = tree.root.children.values()
    assert tree.sink(rest, [99, 100]) == (saved, [3, 4])
    assert (rest.pages, saved.pages) == ([0, 1, 2], [99, 100, 101])
    assert tree.sink(rest, [0, 1, 2]) == (saved, [0, 1, 2])
    assert list(tree.nodes()) == [saved]
    assert (saved.parent, tree.root.num_device_children) == (tree.root, 0)


def test_a_saved_end_joins_nothing_that_is_older_or_of_another_run() -> None:
    tree = tree_of_letters("abc", "abd")
    (upper,) = tree.root.children.values()
    first, second = upper.children.values()
    tree.sink(first, [100])
    tree.sink(second, [101])
    assert tree.sink(upper, [102]) == (upper, [1])  # two children
    assert [node.pages for node in tree.nodes()] == [[0], [102], [100], [101]]
    tree = tree_of_letters("ab")
    (node,) = tree.root.children.values()
    saved, _ = tree.sink(node, [100])
    (rest,) = tree.root.children.values()
    rest.last_use = 1  # used since without its suffix
    assert tree.sink(rest, [101]) == (rest, [0])
    assert saved.parent is rest


@given(st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=12), st.text("ab"))
def test_the_longest_known_prefix_is_found_among_any_words(words: list[str], probe: str) -> None:
    tree = tree_of_letters(*words)
    known = {word[:end] for word in words for end in range(1, len(word) + 1)}
    longest = max((end for end in range(len(probe) + 1) if probe[:end] in known), default=0)
    assert len(tree.match(keys_of(probe)).pages) == longest
    pages = [page for node in tree.nodes() for page in node.pages]
    assert len(pages) == len(set(pages)) == len(known)
