"""A scheduler's whole state as bytes, and back: what is restored goes on exactly alike.

Walks the graph of objects that a scheduler is made of, so no class needs to tell of its fields and
a new one is kept without a word here. Not pickle: only classes of the packages below are made, by
their fields, and no code of theirs runs, for a state may come from anyone. An observer and a
journal are no part of a state.

The form is a table of rows [kind, content]. A value is None, a bool, number, string or bytes as it
is, or [row], a reference. What is frozen comes behind what it holds, so that it can be made at
once.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any

import msgspec

from cluster.scheduler.replay.event_log import MAX_PAGES
from cluster.scheduler.scheduler import Scheduler

_PACKAGES = (
    *("cluster.scheduler.", "cluster.tenancy.", "cluster.lru", "cluster.request"),
    "worker.protocol",
)
_LEFT_OUT = frozenset({"_journal", "_observer"})  # None in a state
_PLAIN = (type(None), bool, int, float, str, bytes)

LIST, TUPLE, DICT, SET, FROZENSET, BYTEARRAY, ENUM, RECORD, OBJECT = range(9)
_FROZEN = frozenset({TUPLE, FROZENSET, ENUM, RECORD})


class _Table(msgspec.Struct, frozen=True, array_like=True):
    classes: list[tuple[str, str, list[str]]]  # module, name, fields
    rows: list[tuple[int, Any]]
    root: int


class _Writer:
    """Fills a table; every object once, however many hold it."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Any]] = []
        self.classes: list[tuple[str, str, list[str]]] = []
        self._row_by_id: dict[int, int] = {}
        self._class_by_type: dict[type, int] = {}
        self._kept: list[object] = []  # so that no id is used twice
        self._unfilled: list[tuple[int, object]] = []

    def table(self, root: object) -> _Table:
        """Return the table of all that can be reached."""
        (row,) = self._value(root)
        while self._unfilled:
            at, item = self._unfilled.pop()
            self.rows[at] = (self.rows[at][0], self._content(item))
        return _Table(self.classes, self.rows, row)

    def _value(self, item: object) -> Any:
        if type(item) in _PLAIN:
            return item
        row = self._row_by_id.get(id(item))
        if row is None:
            row = self._add(item)
            self._row_by_id[id(item)] = row
            self._kept.append(item)
        return [row]

    def _add(self, item: object) -> int:
        kind = _kind_of(item)
        if kind in _FROZEN:
            content = self._content(item)
            self.rows.append((kind, content))
        else:
            self.rows.append((kind, None))
            self._unfilled.append((len(self.rows) - 1, item))
        return len(self.rows) - 1

    def _content(self, item: object) -> Any:
        match item:
            case Enum():
                return [self._class(type(item), ["value"]), item.value]
            case list() | tuple():
                return [self._value(one) for one in item]
            case set() | frozenset():
                return [self._value(one) for one in sorted(item)]
            case dict():
                return [[self._value(key), self._value(value)] for key, value in item.items()]
            case bytearray():
                return bytes(item)
        names = list(_field_names(type(item), item))
        values = [None if name in _LEFT_OUT else self._value(getattr(item, name)) for name in names]
        return [self._class(type(item), names), *values]

    def _class(self, cls: type, names: list[str]) -> int:
        index = self._class_by_type.get(cls)
        if index is None:
            assert cls.__module__.startswith(_PACKAGES), f"{cls} is no part of a scheduler"
            index = self._class_by_type[cls] = len(self.classes)
            self.classes.append((cls.__module__, cls.__qualname__, names))
        assert self.classes[index][2] == names, f"a {cls} has other fields than another one"
        return index


def _kind_of(item: object) -> int:
    for kind, cls in (
        (LIST, list),
        (TUPLE, tuple),
        (DICT, dict),
        (SET, set),
        (FROZENSET, frozenset),
        (BYTEARRAY, bytearray),
        (ENUM, Enum),
    ):
        if isinstance(item, cls):
            return kind
    return RECORD if _is_frozen(type(item)) else OBJECT


def _is_frozen(cls: type) -> bool:
    if issubclass(cls, msgspec.Struct):
        return bool(cls.__struct_config__.frozen)
    return is_dataclass(cls) and bool(cls.__dataclass_params__.frozen)  # type: ignore[attr-defined]


def _field_names(cls: type, item: object) -> Iterable[str]:
    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    if is_dataclass(cls):
        return [field.name for field in fields(cls)]
    slots = [name for base in reversed(cls.__mro__) for name in getattr(base, "__slots__", ())]
    return [*slots, *getattr(item, "__dict__", ())]


class _Reader:
    """Makes the objects of a table."""

    def __init__(self, table: _Table) -> None:
        self._table = table
        self._classes = [_find_class(module, name) for module, name, _ in table.classes]
        self._made: list[Any] = []

    def root(self) -> object:
        """Make everything and return the root."""
        rows = self._table.rows
        self._made = [None if kind in _FROZEN else self._shell(kind, c) for kind, c in rows]
        for at, (kind, content) in enumerate(rows):
            if kind in _FROZEN:
                self._made[at] = self._frozen(kind, content)
        for item, (kind, content) in zip(self._made, rows, strict=True):
            if kind not in _FROZEN:
                self._fill(item, kind, content)
        return self._made[self._table.root]

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            (row,) = value
            return self._made[row]
        return value

    def _values(self, content: Iterable[Any]) -> Iterable[Any]:
        return (self._value(value) for value in content)

    def _shell(self, kind: int, content: Any) -> Any:
        makers: dict[int, Callable[[], Any]] = {
            LIST: list,
            DICT: dict,
            SET: set,
            BYTEARRAY: bytearray,
        }
        if kind == OBJECT:
            cls = self._classes[content[0]]
            return cls() if issubclass(cls, msgspec.Struct) else cls.__new__(cls)
        return makers[kind]()

    def _frozen(self, kind: int, content: Any) -> Any:
        if kind == TUPLE:
            return tuple(self._values(content))
        if kind == FROZENSET:
            return frozenset(self._values(content))
        cls, values = self._classes[content[0]], content[1:]
        if issubclass(cls, Enum) is not (kind == ENUM) or (kind == RECORD and not _is_frozen(cls)):
            raise ValueError(f"{cls.__name__} is no value of kind {kind}")
        if kind == ENUM or issubclass(cls, msgspec.Struct):
            return cls(*self._values(values))
        item = cls.__new__(cls)
        for name, value in self._named(content):
            object.__setattr__(item, name, value)
        return item

    def _fill(self, item: Any, kind: int, content: Any) -> None:
        if kind == DICT:
            item.update((self._value(key), self._value(value)) for key, value in content)
        elif kind == OBJECT:
            for name, value in self._named(content):
                setattr(item, name, value)
        elif kind == SET:
            item.update(self._values(content))
        else:
            item.extend(self._values(content) if kind == LIST else content)

    def _named(self, content: Any) -> Iterable[tuple[str, Any]]:
        names = self._table.classes[content[0]][2]
        return zip(names, self._values(content[1:]), strict=True)


def _find_class(module: str, name: str) -> type:
    if not module.startswith(_PACKAGES) or ".testing" in module or not name.isidentifier():
        raise ValueError(f"{module}.{name} is no part of a scheduler")
    found = getattr(import_module(module), name)
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{module}.{name} is no class of that module")
    return found


_decoder = msgspec.msgpack.Decoder(_Table)


def encode_state(scheduler: Scheduler) -> bytes:
    """Return the state of a scheduler; equal states mean equal plans from here on."""
    return msgspec.msgpack.encode(_Writer().table(scheduler))


def decode_state(state: bytes) -> Scheduler:
    """Return a scheduler in that state, with every invariant checked.

    Raises:
        Exception: of any class, if no scheduler was ever in that state.
    """
    scheduler = _Reader(_decoder.decode(state)).root()
    assert isinstance(scheduler, Scheduler), "the state is of something else"
    config = scheduler.config
    assert config.most_pages <= MAX_PAGES, "too many pages"
    scheduler.check()
    return scheduler
