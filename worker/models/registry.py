"""All families, found by the files of their folder: to add one is to add its file."""

import pkgutil
from functools import cache
from importlib import import_module

from worker.models import families
from worker.models.config_file import ConfigFile
from worker.models.family import Family

AnyFamily = Family[ConfigFile]


@cache
def all_families() -> tuple[AnyFamily, ...]:
    """Return them in the order of their names."""
    modules = sorted(info.name for info in pkgutil.iter_modules(families.__path__))
    found: list[AnyFamily] = []
    for name in modules:
        family = import_module(f"{families.__name__}.{name}").FAMILY
        assert family.name == name, f"{name}.py says that it is {family.name}"
        found.append(family)
    return tuple(found)


@cache
def family_by_architecture() -> dict[str, AnyFamily]:
    """Return them by each name that `architectures` may have, those of generators first."""
    names = [(family.causal_lm, family) for family in all_families()]
    for family in all_families():
        names += [(one, family) for one in (family.classifier, family.multimodal) if one]
    by_name = dict(names)
    assert len(by_name) == len(names), "two families share a name"
    return by_name
