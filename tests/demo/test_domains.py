"""Tasks have one right answer, and no task asked in evaluation is ever trained on."""

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_demo.conversation import sample_conversation
from moiety_demo.domains import DOMAINS, Split, Task, sample_tasks, split_of
from moiety_demo.domains.capitals import CAPITALS
from moiety_demo.domains.descriptions import ANIMALS, ENTITIES
from moiety_demo.domains.units import METRIC, TABLE

NUM_TASKS = 400


def tasks_of(domain: str, split: Split, num_tasks: int = NUM_TASKS, seed: int = 7) -> list[Task]:
    return list(sample_tasks(domain, split, num_tasks, seed))


def numbers_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_task_lies_on_the_side_of_the_split_it_was_sampled_for(domain: str) -> None:
    for split in Split:
        assert all(task.split is split for task in tasks_of(domain, split))


@pytest.mark.parametrize("domain", DOMAINS)
def test_no_held_out_prompt_or_key_occurs_in_training(domain: str) -> None:
    rng = Random(3)
    trained = [DOMAINS[domain](rng, Split.TRAIN) for _ in range(5000)]
    held_out = tasks_of(domain, Split.HELD_OUT)
    assert not {task.prompt for task in trained} & {task.prompt for task in held_out}
    assert not {task.split_key for task in trained} & {task.split_key for task in held_out}


def test_conversations_are_made_of_training_tasks_only() -> None:
    rng = Random(5)
    assert all(task.split is Split.TRAIN for _ in range(2000) for task in sample_conversation(rng).turns)


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(domain: str) -> None:
    first = tasks_of(domain, Split.TRAIN, 20)
    assert first == tasks_of(domain, Split.TRAIN, 20)
    assert first != tasks_of(domain, Split.TRAIN, 20, seed=8)


def test_an_unknown_domain_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="arithmetic"):
        next(sample_tasks("astrology", Split.TRAIN, 1, 0))


@given(st.text())
def test_the_split_of_a_key_is_stable(key: str) -> None:
    assert split_of(key) is split_of(key)


def test_about_an_eighth_of_all_keys_is_held_out() -> None:
    share = sum(split_of(str(i)) is Split.HELD_OUT for i in range(8000)) / 8000
    assert 0.11 < share < 0.14


@pytest.mark.parametrize("split", Split)
def test_arithmetic_answers_are_right(split: Split) -> None:
    for task in tasks_of("arithmetic", split):
        b, a = sorted(numbers_in(task.prompt))
        match task.kind:
            case "add":
                assert int(task.answer) == a + b
            case "subtract":
                assert int(task.answer) == a - b
            case "multiply":
                assert int(task.answer) == a * b
            case _:
                assert int(task.answer) * b == a


@pytest.mark.parametrize("split", Split)
def test_unit_answers_are_right(split: Split) -> None:
    factors = {(c.source, c.target): c.factor for c in (*METRIC, *TABLE)}
    for task in tasks_of("units", split):
        (amount,), answered, target = numbers_in(task.prompt), *task.answer.split(" ")
        named = re.findall(r"[a-z]+", task.prompt)
        factor = next(factor for (s, t), factor in factors.items() if t == target and s in named and t in named)
        assert int(answered) == amount * factor


@pytest.mark.parametrize("split", Split)
def test_comparison_answers_are_right(split: Split) -> None:
    for task in tasks_of("comparisons", split):
        a, *others = numbers_in(task.prompt)
        low, high = sorted([a, *others])[0], sorted([a, *others])[-1]
        match task.kind:
            case "parity":
                expected = f"It ends in {str(a)[-1]}, so it is {'odd' if a % 2 else 'even'}."
            case "order":
                expected = f"{low} < {high}"
            case _:
                expected = str(high if task.kind == "larger" else low)
        assert task.answer == expected


@pytest.mark.parametrize("split", Split)
def test_list_answers_are_right(split: Split) -> None:
    for task in tasks_of("lists", split):
        items, answered = numbers_in(task.prompt), numbers_in(task.answer)
        match task.kind:
            case "sort":
                assert answered == sorted(items)
            case "sort_descending":
                assert answered == sorted(items)[::-1]
            case "reverse":
                assert answered[::-1] == items
            case "length":
                assert answered == [len(items)]
            case "sum":
                assert answered[-1] == sum(items)
                steps = zip(answered[::3], answered[1::3], answered[2::3], strict=True)
                assert all(total + item == result for total, item, result in steps)
                assert [answered[0], *answered[1::3]] == items
            case "max" | "min":
                assert answered == [sorted(items)[-1 if task.kind == "max" else 0]]
            case _:
                assert answered == [items[0 if task.kind == "first" else -1]]


@pytest.mark.parametrize("split", Split)
def test_string_answers_are_right(split: Split) -> None:
    for task in tasks_of("strings", split):
        (word,) = re.findall(r'"([a-z]+)"', task.prompt)
        expected = {
            "reverse": "".join(reversed(word)),
            "uppercase": word.upper(),
            "spell": word.replace("", "-").strip("-"),
            "length": str(len(word)),
            "first": word[:1],
            "last": word[-1:],
            "second": word[1:2],
        }
        assert task.answer == expected[task.kind]


@pytest.mark.parametrize("split", Split)
def test_facts_are_the_known_ones(split: Split) -> None:
    for task in tasks_of("capitals", split):
        given_name = next(n for n in (*CAPITALS, *CAPITALS.values()) if re.search(rf"\b{n}\b", task.prompt))
        pair = (given_name, task.answer) if task.kind == "city" else (task.answer, given_name)
        assert pair in CAPITALS.items() or task.prompt.count("Mexico") == 1
    for task in tasks_of("descriptions", split):
        prompt = task.prompt.lower()
        thing = next(thing for thing in ENTITIES if re.search(rf"\b{thing}\b", prompt))
        expected = "An animal" if thing in ANIMALS else "An object"
        assert task.answer == (ENTITIES[thing] if task.kind == "describe" else expected)


def test_a_greeting_by_name_is_answered_by_that_name() -> None:
    for task in tasks_of("smalltalk", Split.HELD_OUT, 150):
        if task.kind == "name":
            name = task.answer.removeprefix("Hello ").partition("!")[0]
            assert name in task.prompt
