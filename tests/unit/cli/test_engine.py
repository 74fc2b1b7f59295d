"""The words before an image: which variables they set, and how a directory is written there."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yunion_mps.cli.run import mount_words, overridden


@pytest.mark.parametrize(
    "words",
    [
        ["-e", "A=1", "IMAGE"],
        ["-eA=1", "IMAGE"],
        ["-e=A=1", "IMAGE"],
        ["--env", "A=1", "IMAGE"],
        ["--env=A=1", "IMAGE"],
        ["--env", "A", "IMAGE"],  # from docker's own environment, or removed if it is not there
        ["-ite", "A=1", "IMAGE"],
        ["-dteA=1", "IMAGE"],
        ["--rm", "-v", "/a:/b", "--name", "-x", "--gpus=all", "-e", "A=", "IMAGE", "-e", "B=1"],
        ["-h", "trainer", "--rm=false", "-p80:80", "-e", "A=1", "--", "IMAGE", "-e", "B=1"],
    ],
)
def test_a_variable_is_found_however_it_is_written(words: list[str]) -> None:
    assert overridden(words, ["A"]) == ["A"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["IMAGE", "-e", "A=1"],
        ["--", "IMAGE", "-e", "A=1"],
        ["--rm", "IMAGE", "env", "--env=A=1"],
        ["--name", "-e", "IMAGE", "-e", "A=1"],
        ["-v", "-eA=1", "IMAGE"],
        ["-ve", "A=1", "IMAGE"],
        ["--env-file", "A", "--envelope=A", "IMAGE"],
        ["--entrypoint", "--env", "IMAGE", "A=1"],
        ["--env"],
        ["-", "-e", "A=1"],
    ],
)
def test_words_that_resemble_an_option_are_not_overrides(words: list[str]) -> None:
    assert overridden(words, ["A"]) == []


def test_only_the_device_s_own_variables_are_named() -> None:
    words = ["-e", "B=1", "-e", "C=2", "--env=A=3", "IMAGE"]
    assert overridden(words, ["A", "B", "D"]) == ["A", "B"]


def test_a_directory_of_ordinary_characters_is_written_as_people_do() -> None:
    assert mount_words("/run/mps:1") == ["--mount", "type=bind,source=/run/mps:1,target=/run/mps:1"]


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1))
def test_a_directory_of_any_characters_is_two_fields_of_csv(name: str) -> None:
    option, value = mount_words(f"/{name}")
    assert option == "--mount"
    (fields,) = csv.reader([value], strict=True)
    assert fields == ["type=bind", f"source=/{name}", f"target=/{name}"]
