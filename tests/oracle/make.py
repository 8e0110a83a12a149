"""Makes `smollm2.json`: what plain `model.generate` says to 64 prompts, each alone, greedily, in fp32.

Owns the prompts and the file's layout. It never runs the engine: an oracle must not depend on what it
judges.

    python -m tests.oracle.make              # writes the file, a few minutes on two cores
    python -m tests.oracle.make --prompts    # lists the prompts with their lengths, generates nothing
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers

from chairlift.cli.demo import load_demo

from . import ACCEPTED_TIE, ORACLE_PATH, prompts_checksum

NEW_TOKENS = 64
# Gaps below this are written down: ten times what the tests accept, so that the file tells how much room
# there is.
RECORDED_GAP = 1e-3

# The 43 plain prompts are cut to exactly these lengths (in tokens), the 21 chat prompts get whole words up to
# theirs. Short ones prevail, as in real traffic; 8 and 600 are the ends.
PLAIN_LENGTHS = (8, 9, 11, 13, 15, 16, 17, 20, 24, 29, 31, 32, 33, 38, 44, 52, 60, 63, 64, 81, 77, 90)
PLAIN_LENGTHS += (104, 119, 127, 128, 129, 146, 181, 188, 212, 240, 256, 257, 300, 318, 372, 410, 460, 500)
PLAIN_LENGTHS += (545, 577, 600)
CHAT_LENGTHS = (
    44,
    47,
    50,
    55,
    60,
    66,
    74,
    83,
    95,
    110,
    128,
    150,
    176,
    205,
    240,
    280,
    325,
    375,
    430,
    490,
    550,
)

PLACES = ("the harbour", "a mountain village", "the old library", "the night market", "a research station")
PLACES += (
    "the botanical garden",
    "a small bakery",
    "the railway depot",
    "the school workshop",
    "an island ferry",
)
PEOPLE = ("Marta", "Deng", "Ibrahim", "Sofia", "Anders", "Leila", "Tomas", "Wanjiru", "Priya", "Mateo")
THINGS = (
    "a brass compass",
    "seven empty jars",
    "a broken clock",
    "the wrong map",
    "a letter without a stamp",
)
THINGS += ("a bag of lentils", "two left gloves", "a radio that hummed", "a ladder", "an unsigned painting")
TOPICS = (
    "gravity",
    "bread",
    "tides",
    "glaciers",
    "compilers",
    "bees",
    "inflation",
    "vaccines",
    "bridges",
    "rivers",
)
TOPICS += (
    "photosynthesis",
    "elections",
    "earthquakes",
    "telescopes",
    "soil",
    "public transport",
    "memory",
    "salt",
)
ADJECTIVES = (
    "careful",
    "stubborn",
    "quiet",
    "generous",
    "hurried",
    "curious",
    "tired",
    "cheerful",
    "blunt",
    "shy",
)
VERBS = (
    "measured",
    "repaired",
    "described",
    "forgot",
    "borrowed",
    "painted",
    "counted",
    "sold",
    "hid",
    "weighed",
)

STORY = (
    "{person} arrived at {place} before sunrise, carrying {thing} and a {adjective} smile.",
    "Nobody had told {person} that {place} would be closed, so {thing} had to wait outside.",
    "It took {n} minutes for {person}, who was {adjective} about such matters, to explain what had happened.",
    '"If you {verb_past} it yesterday," said {person}, "then who has {thing} now?"',
    "The {adjective} stranger {verb_past} {thing}, nodded once, and walked back towards {place}.",
    "By the end of the week there were {n} people in {place}, and each of them had seen {thing}.",
    "Later, {person} would remember only the rain, the smell of {place}, and how {adjective} everyone was.",
)
ESSAY = (
    "Most introductions to {topic} begin with a definition, but it is easier to begin with an example.",
    "When people first studied {topic}, they measured {m} cases and found that {n} of them agreed.",
    "This does not mean that {topic} and {topic2} are the same, although the two are often confused.",
    "A {adjective} reader will object that {topic2} was left out, and the objection is fair.",
    "In practice, three things matter for {topic}: its size, how fast it changes, and who pays for it.",
    "Between {year} and {year2}, the number of studies of {topic} grew from {n} to {m} a year.",
    "The simplest explanation of {topic} needs no mathematics; the correct one needs a little.",
)
LETTER = (
    "Dear {person}, thank you for your message about {topic}.",
    "We have looked at order {m}, and we can confirm that {thing} left our warehouse on day {n}.",
    "Please note that {place} is closed on public holidays, and that replies may take {n} working days.",
    "If {thing} does not reach you by then, call {person}; it is {adjective} work, but we will do it.",
    "We would also like to invite you to our evening on {topic2} at {place}, which starts at {h} o'clock.",
)
LEDGER = (
    "{name}: {n} units at {h}.50 each, delivered to {place}; paid.",
    "{name}: {m} units at {h}.25 each, held at {place}; reason: {adjective} paperwork.",
    "Subtotal for {name}: {m}. Carried forward: {n}. Balance due in {year}: {m2}.",
    "Note {h}: the entry for {name} was {verb_past} twice and corrected once.",
)
CODE = (
    "def count_{word}(items, limit={n}):\n    total = 0\n    for item in items:\n"
    "        if item.{word} > limit:\n            total += item.{word}\n    return total\n\n",
    "class {Word}Queue:\n    def __init__(self, size={m}):\n        self.size = size\n"
    "        self.items = []\n\n"
    "    def push(self, {word}):\n        if len(self.items) >= self.size:\n"
    '            raise ValueError("the queue is full")\n        self.items.append({word})\n\n',
    "# {Word} number {n} is handled first, because the others depend on it.\n"
    "for i in range({h}):\n    print(i, count_{word}([i, i + {n}], {m}))\n\n",
)
ABROAD = (
    "Chaque matin, {person} ouvre la fenêtre et compte {n} bateaux dans le port.",
    "Am Abend sitzt {person} am Tisch, schreibt {h} Zeilen und denkt an das Meer.",
    "En el mercado, {person} compra {n} naranjas, un pan y una carta para su hermana.",
    "La sera {person} torna a casa con {h} libri e nessuna voglia di parlare.",
)
QUESTIONS = (
    "Explain {topic} to a {adjective} ten-year-old in a few sentences.",
    "What is the difference between {topic} and {topic2}?",
    "Write a short poem about {thing} that {person} {verb_past} at {place}.",
    "I have {n} apples and give {h} of them to {person}. How many are left? Show each step.",
    "List {h} reasons why {topic} matters for people who live near {place}.",
    "Write a Python function that returns the {n} largest {word} values of a list.",
    "Give me a recipe that uses {thing} as a joke and {n} minutes of real work.",
    "Rewrite this sentence so that it sounds more {adjective}: {person} {verb_past} {thing}.",
)
SYSTEMS = (
    None,
    "You answer in short sentences.",
    "You are a {adjective} editor. You point out what is unclear and say how to mend it.",
)
# What a plain prompt is made of: the sentences it draws from and what stands between them.
PROSE = (
    (STORY, " "),
    (ESSAY, " "),
    (LETTER, "\n"),
    (LEDGER, "\n- "),
    (CODE, ""),
    (ABROAD, " "),
    (ESSAY, "\n\n"),
)


class Prompt(NamedTuple):
    """One prompt of the oracle: its name in the file and its token ids."""

    id: str
    ids: list[int]


def fill(template: str, rng: random.Random) -> str:
    """`template` with every slot filled from the word lists."""
    word = rng.choice(("weight", "price", "height", "depth", "score", "delay"))
    topic, topic2 = rng.sample(TOPICS, 2)
    return template.format(
        person=rng.choice(PEOPLE),
        place=rng.choice(PLACES),
        thing=rng.choice(THINGS),
        topic=topic,
        topic2=topic2,
        adjective=rng.choice(ADJECTIVES),
        verb_past=rng.choice(VERBS),
        name=rng.choice(THINGS).split()[-1].capitalize(),
        word=word,
        Word=word.capitalize(),
        n=rng.randrange(12, 90),
        m=rng.randrange(100, 1000),
        m2=rng.randrange(1000, 9000),
        h=rng.randrange(3, 11),
        year=rng.randrange(1890, 1950),
        year2=rng.randrange(1960, 2020),
    )


def sentences(templates: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    """Endless sentences: every template once in a shuffled order, then all of them again, filled anew."""
    while True:
        for template in rng.sample(templates, len(templates)):
            yield fill(template, rng)


def plain_prompt(tokenizer: Any, length: int, index: int, rng: random.Random) -> list[int]:
    """Text to be continued, cut to exactly `length` tokens."""
    templates, between = PROSE[index % len(PROSE)]
    text = ""
    for sentence in sentences(templates, rng):
        text += sentence + between
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > length:  # more, not as many: the last token of a text may yet grow
            return list(ids[:length])
    raise AssertionError("sentences never end")


def chat_prompt(tokenizer: Any, length: int, index: int, rng: random.Random) -> list[int]:
    """A chat of at most `length` tokens, the assistant to speak next; three turns from 200 tokens on."""
    system = SYSTEMS[index % len(SYSTEMS)]
    messages = [] if system is None else [{"role": "system", "content": fill(system, rng)}]
    if length >= 200:
        messages.append({"role": "user", "content": fill(QUESTIONS[(index + 3) % len(QUESTIONS)], rng)})
        messages.append({"role": "assistant", "content": " ".join(fill(t, rng) for t in ESSAY[:3])})
    question = fill(QUESTIONS[index % len(QUESTIONS)], rng)
    background, _ = PROSE[index % 3]
    material: list[str] = []

    def ids(material: list[str]) -> list[int]:
        text = question if not material else f"{question}\n\n{' '.join(material)}"
        text = tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    for sentence in sentences(background, rng):
        for word in sentence.split():
            if len(ids([*material, word])) > length:
                return ids(material)
            material.append(word)
    raise AssertionError("sentences never end")


def make_prompts(tokenizer: Any) -> list[Prompt]:
    """The 64 prompts, plain and chat, long and short mixed in one fixed order."""
    rng = random.Random(20)
    prompts = [
        Prompt(f"plain-{n:02}", plain_prompt(tokenizer, length, n, rng)) for n, length in enumerate(PLAIN_LENGTHS)
    ]
    prompts += [Prompt(f"chat-{n:02}", chat_prompt(tokenizer, length, n, rng)) for n, length in enumerate(CHAT_LENGTHS)]
    rng.shuffle(prompts)
    return prompts


def answer(model: Any, prompt: list[int]) -> dict[str, Any]:
    """The greedy continuation of one prompt, and `[index, gap, runner-up]` wherever the choice was close."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    if len(tokens) != NEW_TOKENS:
        raise RuntimeError(f"generate stopped after {len(tokens)} of {NEW_TOKENS} tokens; is an eos token still set?")
    best = torch.cat(output.logits).float().topk(2)
    if best.indices[:, 0].tolist() != tokens:
        raise RuntimeError("generate did not take the best logit; is a logits processor set?")
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    runners_up = best.indices[:, 1].tolist()
    close = [[i, round(gap, 7), runners_up[i]] for i, gap in enumerate(gaps) if gap < RECORDED_GAP]
    return {"tokens": tokens, "near_ties": close}


def main() -> None:
    """Writes the file, or lists the prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", action="store_true", help="list the prompts and their lengths, then stop")
    parser.add_argument("--threads", type=int, default=2, help="torch threads (default %(default)s)")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_demo(torch.float32)
    model.set_attn_implementation("sdpa")
    prompts = make_prompts(tokenizer)
    if arguments.prompts:
        for prompt in prompts:
            print(f"{prompt.id} {len(prompt.ids):4} {tokenizer.decode(prompt.ids)!r}")
        print(f"{len(prompts)} prompts, {sum(len(p.ids) for p in prompts)} tokens")
        return

    # `generate` fills what a generation config leaves open from the model's own, so eos goes there.
    model.generation_config.eos_token_id = None
    cases = []
    start = time.perf_counter()
    for number, prompt in enumerate(prompts, 1):
        cases.append({"id": prompt.id, "prompt": prompt.ids, **answer(model, prompt.ids)})
        print(f"\r{number}/{len(prompts)} {time.perf_counter() - start:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)

    head = {
        "model": "SmolLM2-135M-Instruct, Q4_1 unpacked to fp32",
        "how": "model.generate, one prompt at a time, greedy, eos off, fp32, sdpa",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "new_tokens": NEW_TOKENS,
        "prompts_sha256": prompts_checksum(case["prompt"] for case in cases),
    }
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    body = json.dumps(head, indent=0)[:-2]
    ORACLE_PATH.write_text(f'{body},\n"cases": [\n{lines}\n]}}\n')
    gaps = [gap for case in cases for _, gap, _ in case["near_ties"]]
    accepted = sum(gap < ACCEPTED_TIE for gap in gaps)
    print(f"{ORACLE_PATH}: {len(cases)} cases, {len(gaps)} gaps below {RECORDED_GAP:g}, {accepted} accepted")


if __name__ == "__main__":
    main()
