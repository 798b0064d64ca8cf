import json
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import Field, ValidationError

from cosmos_rl_core.canonical import canonical_json, digest, require_exchangeable, sha256
from cosmos_rl_core.config.base import Section
from cosmos_rl_core.errors import ConfigError
from stages.artifacts.request import Input, Request
from stages.contracts import ModelRef


class Inner(Section):
    scale: float = 1.0
    place: str = Field(default="here", json_schema_extra={"identity": False})


class Outer(Section):
    rate: float = 1.0
    inner: Inner = Inner()
    by_name: dict[str, Inner] = {}
    path: str = Field(default="/a", json_schema_extra={"identity": False})


class OuterLater(Outer):
    """The same section after a release that added two fields."""

    added: float = Field(default=0.0, json_schema_extra={"neutral": 0.0})
    added_section: Inner = Field(default=Inner(), json_schema_extra={"neutral": {"scale": 1.0}})


def test_the_order_of_keys_does_not_matter():
    assert canonical_json({"b": 1, "a": {"d": 2, "c": 3}}) == b'{"a":{"c":3,"d":2},"b":1}'
    assert digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})


def test_the_order_of_lists_does():
    assert digest([1, 2]) != digest([2, 1])


def test_a_digest_is_the_sha256_of_the_utf8_spelling():
    assert canonical_json({"text": "日本 é"}) == '{"text":"日本 é"}'.encode()
    assert digest({}) == sha256(b"{}") == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_equals_nothing_has_no_spelling(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": [number]})
    with pytest.raises(ValidationError, match="finite number"):
        Outer(rate=number)


def test_numbers_take_their_fields_type_before_they_are_digested():
    assert digest(Outer(rate=1).identity()) == digest(Outer(rate=1.0).identity())
    assert canonical_json(Outer(rate=1).identity()) == b'{"by_name":{},"inner":{"scale":1.0},"rate":1.0}'
    # Without the type they would differ.
    assert digest(1) != digest(1.0)


def test_an_identity_is_equal_after_json():
    outer = Outer(rate=3, by_name={"x": Inner(scale=0.1)})
    assert digest(Outer.model_validate_json(outer.model_dump_json()).identity()) == digest(outer.identity())


def test_the_place_of_something_is_no_part_of_its_identity():
    moved = Outer(path="/b", inner=Inner(place="there"), by_name={"x": Inner(place="there")})
    assert moved.identity() == Outer(by_name={"x": Inner()}).identity()
    assert moved.identity() == {"rate": 1.0, "inner": {"scale": 1.0}, "by_name": {"x": {"scale": 1.0}}}


def test_a_field_that_was_added_later_is_left_out_at_its_default():
    assert OuterLater().identity() == Outer().identity()
    assert OuterLater(added_section=Inner(place="there")).identity() == Outer().identity()
    assert OuterLater(added=0.5).identity() == Outer().identity() | {"added": 0.5}
    assert OuterLater(added_section=Inner(scale=2)).identity() == Outer().identity() | {"added_section": {"scale": 2.0}}


def test_sections_are_closed_and_frozen():
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Outer.model_validate({"rat": 1})
    with pytest.raises(ValidationError, match="frozen"):
        Outer().rate = 2.0  # pyright: ignore[reportAttributeAccessIssue]


def request(model_path="/here", slot="s", url="u", generation=1, rate: float = 1, iteration=0):
    model = ModelRef(path=model_path, adapter="sd3", digest="d")
    source = Input(url=url, generation=generation, manifest=f"m{generation}", content="c", fingerprint="f")
    config = {"model": model.model_dump(), "lora": {"lora_alpha": rate}}
    return Request.model_validate(
        {
            "stage": "export",
            "slot": slot,
            "seed": 0,
            "iteration": iteration,
            "config": config,
            "inputs": {"policy": [source.model_dump()]},
        }
    )


def test_a_fingerprint_ignores_paths_urls_and_generations():
    moved = request(model_path="/there", slot="other", url="elsewhere", generation=2)
    assert request().fingerprint == moved.fingerprint
    assert request().fingerprint == request(rate=1.0).fingerprint
    assert request().fingerprint != request(rate=2).fingerprint
    assert request().fingerprint != request(iteration=1).fingerprint


def test_a_fingerprint_is_equal_after_json():
    asked = request(rate=3)
    assert Request.model_validate_json(asked.model_dump_json()).fingerprint == asked.fingerprint


def test_fingerprints_do_not_move_between_releases():
    # Changing this number makes every artifact that anybody has stale.
    assert request().fingerprint == "ae7d6952596fcac99f071ec66015e722e0c807a82d9007b9a626758e765a3bb8"


def test_a_request_refuses_an_unknown_stage_and_a_missing_input():
    with pytest.raises(ValidationError, match=r"unknown stage 'exprt'; known: .*export"):
        Request.model_validate(request().model_dump() | {"stage": "exprt"})
    with pytest.raises(ValidationError, match="export needs exactly one input 'policy', got 0"):
        Request.model_validate(request().model_dump() | {"inputs": {}})


def test_config_errors_are_value_errors_so_that_pydantic_reports_them_with_the_others():
    assert issubclass(ConfigError, ValueError)


class Named(NamedTuple):
    name: str


class Kind(StrEnum):
    PICTURE = "picture"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({Named("a"): 1}, r"value: key Named Named\(name='a'\)"),
        ([{"a": [0, (1, 2)]}], r'value\[0\]\["a"\]\[1\]: tuple \(1, 2\)'),
        ({"a": {3: "three"}}, r'value\["a"\]: key int 3'),
        ([np.float64(0.5)], r"value\[0\]: float64"),
        ([np.int64(1)], r"value\[0\]: int64"),
        ({"kind": Kind.PICTURE}, r'value\["kind"\]: Kind'),
        (b"bytes", "value: bytes"),
        ({"a", "b"}, "value: set"),
    ],
)
def test_ranks_do_not_exchange_values_that_json_would_change(value: Any, place: str):
    with pytest.raises(TypeError, match=place):
        require_exchangeable(value)


def test_ranks_exchange_plain_values_numbers_that_are_not_finite_included():
    value = {"rows": [{"t": -0.0, "count": 2**70, "text": "\ud800\u2028"}, None, True, []]}
    require_exchangeable(value)
    assert json.loads(json.dumps(value)) == value
    require_exchangeable([float("nan"), float("-inf")])
