"""distinct-n and repetition against counts by hand and a slow reference."""

from __future__ import annotations

import random

import pytest

from gpt2_chinese.evaluate.samples import units, variety


def test_units_are_characters_of_chinese_and_runs_of_letters_and_digits() -> None:
    assert units("今天 2024年，GPT模型\n很café。") == ["今", "天", "2024", "年", "，", "GPT", "模", "型", "很", "café", "。"]


def test_counts_by_hand() -> None:
    found = variety(["甲乙甲乙甲乙", "甲"])
    assert found["texts"] == 2 and found["units"] == 7
    assert found["distinct_1"] == 2 / 7 and found["distinct_2"] == 2 / 5 and found["distinct_3"] == 2 / 4
    assert found["repetition_4"] == 1 - 2 / 3, "甲乙甲乙 and 乙甲乙甲 of three; the text of one character does not count"


def test_texts_without_enough_units_have_no_number() -> None:
    assert variety(["", "甲"]) == {"texts": 2, "units": 1, "distinct_1": 1.0, "distinct_2": None, "distinct_3": None,
                                   "repetition_4": None}  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_reference_agrees(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choices("甲乙丙丁", k=rng.randrange(0, 30))) for _ in range(6)]
    found = variety(texts)
    for n in (1, 2, 3):
        seen: list[str] = []
        total = 0
        for text in texts:
            for place in range(len(text)):
                gram = text[place : place + n]
                if len(gram) == n:
                    total += 1
                    if gram not in seen:
                        seen.append(gram)
        assert found[f"distinct_{n}"] == len(seen) / total
    shares = []
    for text in texts:
        repeated = [text[p : p + 4] in [text[q : q + 4] for q in range(p)] for p in range(len(text) - 3)]
        shares += [sum(repeated) / len(repeated)] if repeated else []
    assert found["repetition_4"] == pytest.approx(sum(shares) / len(shares))
