"""One cache, many calls: whoever lost it prefills again or says so, never a wrong text; threads wait."""

import threading

import pytest

from engine import LLM
from runtime.errors import InputError

TEXTS = ("import os\n", "class Reader:\n    def __init__(self")
TAKEN = "taken the KV cache"


@pytest.fixture(scope="module", params=["full", "self_index"])
def llm(request):
    return LLM(method=request.param)


def alone(llm, text, n=10):
    return llm.generate(text, n)[0].text


def test_two_streams_at_once(llm):
    want = [alone(llm, t) for t in TEXTS]
    a, b = (llm.stream(t, 10) for t in TEXTS)
    next(a)
    second = [next(b)]
    with pytest.raises(InputError, match=TAKEN):
        next(a)
    assert "".join(second + list(b)) == want[1]
    assert ["".join(llm.stream(t, 10)) for t in TEXTS] == want  # one after the other


@pytest.mark.parametrize("take", ["generate", "say", "use", "conversation"])
def test_a_call_in_the_middle_of_a_stream(llm, take):
    stream = llm.stream(TEXTS[0], 10)
    next(stream)
    if take == "generate":
        llm.generate(TEXTS[1], 10)
    elif take == "say":
        llm.conversation().say(TEXTS[1], 3)
    elif take == "use":
        llm.use(llm.method)
    else:  # opened alone
        llm.conversation()
    with pytest.raises(InputError, match=TAKEN):
        "".join(stream)


def test_two_conversations(llm):
    turns = [("import os", "def f"), ("class A", "x = 1")]
    want = []
    for said in turns:
        talk = llm.conversation()
        want.append([talk.say(t, 5).tokens for t in said])
    talks = [llm.conversation() for _ in turns]
    got = [[talk.say(said[i], 5).tokens for talk, said in zip(talks, turns, strict=True)] for i in range(2)]
    if llm.method == "full":  # a lossy method compresses again what a turn had left as it was
        assert [list(row) for row in zip(*got, strict=True)] == want
    assert [row[0] for row in want] == got[0]


@pytest.mark.parametrize("length", [10, 60])
def test_a_generate_between_two_turns(length):
    llm = LLM()
    talk = llm.conversation()
    want = [talk.say(t, 5).tokens for t in ("import os", "def f")]
    talk = llm.conversation()
    got = [talk.say("import os", 5).tokens]
    llm.generate(TEXTS[1], length)
    second = talk.say("def f", 5)
    assert [*got, second.tokens] == want and second.prompt_tokens > 10  # all of it was prefilled


def test_threads_wait_for_each_other(llm):
    want, got = [alone(llm, t, 24) for t in TEXTS], [None] * 8

    def run(i):
        got[i] = alone(llm, TEXTS[i % 2], 24)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(got))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == want * 4
