"""Components in their five forms."""

from typing import Any

import pytest

from agl_core.errors import ConfigError
from agl_core.trainer.init_utils import build_component, instantiate_component, load_class


class Part:
    def __init__(self, size: int = 1, name: str = "none") -> None:
        self.size = size
        self.name = name


class Other:
    pass


def make_part() -> Part:
    return Part(7)


HERE = "tests.agl_core.trainer.test_init_utils"
REGISTRY = {"small": f"{HERE}.Part", "other": Other}


def build(spec: Any, **options: Any) -> Any:
    return build_component(spec, expected_type=Part, spec_name="part", **options)


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (Part(5), 5),
        (Part, 3),
        (make_part, 7),
        (lambda: Part(8), 8),
        (f"{HERE}.Part", 3),
        (f"{HERE}:Part", 3),
        (f"{HERE}.make_part", 7),
        ("small", 3),
        ({"type": f"{HERE}.Part", "size": 4}, 4),
        ({"type": "small"}, 3),
        ({"name": "small"}, 3),
        ({"type": Part, "size": 9}, 9),
    ],
)
def test_a_component_comes_in_five_forms(spec: Any, size: int):
    built = build(spec, registry=REGISTRY, optional_defaults={"size": 3, "unknown": 1})
    assert isinstance(built, Part)
    assert built.size == size


def test_an_instance_is_taken_as_it_is():
    part = Part()
    assert build(part) is part


def test_defaults_may_be_functions_and_give_way_to_what_is_said():
    built = instantiate_component(Part, {"name": "x"}, {"size": lambda: 6, "name": "y"})
    assert (built.size, built.name) == (6, "x")


def test_nothing_is_the_default_or_none_or_an_error():
    assert build(None, default_factory=make_part).size == 7
    assert build(None, allow_none=True) is None
    with pytest.raises(ConfigError, match="part is needed; give a Part, its class"):
        build(None)


def test_a_dict_without_a_type_is_of_the_default_class():
    options = {"dict_requires_type": False, "dict_default_cls": Part}
    assert build({"size": 2}, **options).size == 2
    with pytest.raises(ConfigError, match="part: a dict needs a 'type'"):
        build({"size": 2})
    with pytest.raises(ConfigError, match="Part has no argument 'width'; it has name, size"):
        build({"width": 2}, **options)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (Other, ConfigError, "part cannot be Other; give a Part"),
        (5, ConfigError, "part cannot be int; give a Part"),
        (lambda: Other(), TypeError, "part is a Other, not a Part"),
        ("other", TypeError, "part is a Other, not a Part"),
        ("large", ConfigError, "part: there is no 'large'; give other, small, or a path"),
        ("no_such_module.Part", ConfigError, "part: 'no_such_module.Part': cannot import"),
        ("agentlightning.a.Part", ConfigError, "write 'agl_core.a.Part'"),
        (f"{HERE}.Nothing", ConfigError, "has no 'Nothing'"),
    ],
)
def test_what_is_no_such_component_is_told(spec: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        build(spec, registry=REGISTRY)


def test_messages_can_be_given():
    with pytest.raises(ConfigError, match="no int for Part"):
        build(5, invalid_spec_error_fmt="no {actual_type} for {expected_type}")
    with pytest.raises(TypeError, match="Other is no Part"):
        build(lambda: Other(), type_error_fmt="{type_name} is no {expected_type}")


def test_a_path_leads_to_a_class():
    assert load_class(f"{HERE}.Part") is Part
    with pytest.raises(ConfigError, match="'Part' is no path"):
        load_class("Part")
