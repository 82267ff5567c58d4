"""The built-in model: a lossless tokenizer, a small folder, roles that act as their prompts say."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cothink import builtin
from cothink.builtin.chats import CLEAN, MIXED, chats, sloppy, work
from cothink.builtin.prompts import INSTRUCT, PROMPTS
from cothink.tasks.wordsums import draw, load
from cothink.types import Message

PLAN = re.compile(
    r"(start \d+(, (add \d+|take \d+|double))+)?(\.? ?\\boxed\{\d+\})?|Solve it\.|find what \w+ has|[a-z ]+"
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(builtin.path())


@pytest.fixture(scope="module")
def sampler(tokenizer):
    from transformers import AutoModelForCausalLM

    from cothink.builtin.measure import Sampler

    return Sampler(AutoModelForCausalLM.from_pretrained(builtin.path()).eval(), tokenizer)


def test_the_folder_is_small_and_the_path_needs_no_torch():
    assert sum(file.stat().st_size for file in builtin.path().iterdir()) <= 8 * 2**20
    code = "import sys, cothink.builtin.prompts as p; assert 'torch' not in sys.modules; print(len(p.PROMPTS))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "9\n"


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80))
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_words_and_digits_are_single_tokens(tokenizer):
    def pieces(text):
        return [tokenizer.decode([at]) for at in tokenizer(text)["input_ids"]]

    assert pieces("12 + 30 = 42. \\boxed{42}") == [*"12", " + ", *"30", " = ", *"42", ".", " \\boxed{", *"42", "}"]
    assert pieces("Tom has 15 apples.") == ["Tom", " has ", "1", "5", " apples", "."]
    assert pieces("take 2 [FINISH]") == ["take ", "2", " [FINISH]"]
    assert all(len(tokenizer(digit)["input_ids"]) == 1 for digit in "0123456789")


def test_the_template_is_plain_chatml_without_a_system_prompt_of_its_own(tokenizer):
    from cothink.builtin.tokenizer import render

    user = [{"role": "user", "content": "2 + 2?"}]
    prompt = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|pad|>"
    for chat in islice(chats(random.Random(5)), 50):
        dicts = [{"role": message.role, "content": message.content} for message in chat]
        assert tokenizer.apply_chat_template(dicts, tokenize=False) == render(chat)


def test_gold_steps_lead_to_gold_and_sloppy_steps_are_others():
    rng, faults = random.Random(3), 0
    for _ in range(200):
        task = draw(rng, rng.randint(1, 8), rng.randint(0, 2))
        assert str(work(task.meta["steps"])[1]) == task.answer
        faults += sloppy(rng, task) != list(task.meta["steps"])
    assert faults > 190
    assert work(["start 5", "add 3", "double", "take 2"]) == ("5 + 3 = 8. 8 + 8 = 16. 16 - 2 = 14.", 14)
    assert work(["take 9", "add 1"], 8) == ("8 + 1 = 9.", 9)


def test_every_clean_plan_is_full_and_a_mixed_one_may_be_anything():
    def plans(habits):
        made = islice(chats(random.Random(1), habits), 1500)
        return [chat[2].content for chat in made if chat[0].content == PROMPTS["meta"]]

    assert all(plan.startswith("start ") for plan in plans(CLEAN))
    assert {"start", "Solve", "", "find"} <= {plan.split(" ")[0] for plan in plans(MIXED)}


def test_meta_writes_plans_and_reasoning_follows_them(sampler):
    tasks = load("test", levels=[2, 4], count=24, seed=3)
    plans = sampler.ask("meta", [task.question for task in tasks], temperature=0)
    assert all(PLAN.fullmatch(plan) for plan in plans), plans
    users = [INSTRUCT.format(question=t.question, plan=", ".join(t.meta["steps"])) for t in tasks]
    answers = sampler.ask("reasoning", users, temperature=0)
    right = sum(answer.endswith(f"\\boxed{{{task.answer}}}") for task, answer in zip(tasks, answers))
    assert right >= 20, answers


def test_a_dialogue_ends_with_the_tag_and_a_box(sampler):
    chat = [Message("system", PROMPTS["meta_multi"]), Message("user", load("test", levels=2, count=1)[0].question)]
    text = sampler.say([chat], temperature=0)[0]
    assert text is not None and text
