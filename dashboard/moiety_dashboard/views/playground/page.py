"""The playground: a conversation with one or two models under a tenant's key, with usage, cost and trace beside it.

Requests go to the gateway with the entered key, so they count under the quotas of its tenant and project.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import streamlit as st

from moiety_dashboard import panels, session
from moiety_dashboard.client import AdminClient
from moiety_dashboard.escaping import as_text, show_unseen
from moiety_dashboard.frames.catalogue import names_for_requests
from moiety_dashboard.page import Page
from moiety_dashboard.views.key_forms import PLAYGROUND_KEY
from moiety_dashboard.views.playground.conversation import TIERS, PlaygroundConversation, PlaygroundSettings, Turn
from moiety_dashboard.views.playground.details import draw_details, draw_figures, draw_known_cost
from moiety_dashboard.views.playground.stream import StreamedAnswer, streaming

CONVERSATION = "playground conversation"
FIELDS = "playground fields"  # values of the last request, for the next visit of the page
NO_MODEL = "none"
FIRST_PROMPT = "What is 17 + 25?"
MAX_TURNS = 20  # a longer conversation loses its oldest turns


def draw(page: Page) -> None:
    panels.head("Playground", "Talk to one model, or to two side by side, with a tenant's key")
    conversation: PlaygroundConversation = st.session_state.setdefault(CONVERSATION, PlaygroundConversation())
    models: list[str] = []
    with page.asking("playground models") as client:
        models = usable_models(client)
    key, settings, prompt = ask(models, conversation.num_answered)
    if prompt is not None and key and settings.models:
        send(page, key, conversation, settings, prompt)
        st.rerun()  # the form is above: an answered prompt is removed from it
    elif prompt is not None:
        missing = "an API key" if not key else "a model"
        st.warning(f"Enter {missing} first.", icon=":material/key:")
    draw_conversation(page, conversation)


def usable_models(client: AdminClient) -> list[str]:
    """Return the names that requests can have, as far as the user may see them."""
    if not session.may("models.read"):
        return []
    return names_for_requests(client.get("/models").data["data"])


def ask(models: list[str], num_answered: int) -> tuple[str, PlaygroundSettings, str | None]:
    """Draw the form; return the key, the settings and the prompt, None unless it was sent.

    The prompt stays in its field until it is answered, so `num_answered` names the field.
    """
    last: dict[str, Any] = st.session_state.get(FIELDS, {})
    with st.form("request", border=True):
        first, second, third = st.columns([2, 2, 2])
        key = first.text_input(
            "API key", st.session_state.get(PLAYGROUND_KEY, ""), type="password", autocomplete="off",
            placeholder="mty_…",
            help="An inference key of a tenant. It is sent to the gateway with each request, which counts under the "
                 "quotas of its project and tenant. It is kept only in this browser session.",
        )  # fmt: skip
        model = choose_model(second, "Model", models, last.get("model") or (models[0] if models else None))
        other = choose_model(third, "Second model", [NO_MODEL, *models], last.get("other") or NO_MODEL)
        first, second, third = st.columns([2, 2, 2])
        tier = first.selectbox("Class", list(TIERS), format_func=lambda tier: TIERS[tier])
        temperature = second.number_input("Temperature", 0.0, 2.0, last.get("temperature"), 0.1, placeholder="default")
        max_tokens = third.number_input("Max tokens", 1, value=last.get("max_tokens", 256))
        system = st.text_area("System prompt", last.get("system", ""), height=68, placeholder="none")
        prompt = st.text_area(
            "Prompt", "" if num_answered else FIRST_PROMPT, height=90, placeholder="The next message",
            key=f"playground prompt {num_answered}",
        )  # fmt: skip
        sent = st.form_submit_button("Send", type="primary", icon=":material/send:")
    names = tuple(name for name in (model, other) if name and name != NO_MODEL)
    settings = PlaygroundSettings(names, tier, int(max_tokens), temperature, system.strip())
    if sent:
        st.session_state[PLAYGROUND_KEY] = key.strip()
        st.session_state[FIELDS] = {
            "model": model, "other": other, "temperature": temperature, "max_tokens": int(max_tokens),
            "system": system,
        }  # fmt: skip
        if not prompt.strip():
            st.warning("Enter a prompt first.", icon=":material/edit:")
    return key.strip(), settings, prompt if sent and prompt.strip() else None


def choose_model(place: Any, label: str, models: list[str], shown: str | None) -> str | None:
    """Draw a list of models, in which a name that no engine has reported can be entered too."""
    options = models if shown is None or shown in models else [*models, shown]
    at = None if shown is None else options.index(shown)
    chosen: str | None = place.selectbox(
        label, options, at, accept_new_options=True, placeholder="name of a model", key=f"playground {label}"
    )
    return chosen


def send(page: Page, key: str, conversation: PlaygroundConversation, settings: PlaygroundSettings, prompt: str) -> None:
    """Send the next turn, draw its answers as they arrive, and add it to the conversation."""
    bodies = conversation.bodies(settings, prompt)
    place = st.empty()
    with streaming(page.settings.gateway_url, key, bodies) as (answers, steps), place.container():
        draws = draw_arriving(prompt, answers)
        for _ in steps:
            for draw_answer in draws:
                draw_answer()
    place.empty()
    conversation.add_turn(Turn(prompt, answers), MAX_TURNS)


def draw_arriving(prompt: str, answers: list[StreamedAnswer]) -> list[Callable[[], None]]:
    """Draw a column for each answer; return the functions that draw what has arrived of each."""
    draw_prompt(prompt)
    draws: list[Callable[[], None]] = []
    for column, answer in zip(st.columns(len(answers)), answers, strict=True):
        with column.container(border=True):
            st.caption(as_text(answer.model))
            place = st.empty()

        def draw_answer(place: Any = place, answer: StreamedAnswer = answer) -> None:
            place.text(show_unseen(answer.text or answer.reasoning or "…"))  # not rendered as Markdown

        draws.append(draw_answer)
    return draws


def draw_conversation(page: Page, conversation: PlaygroundConversation) -> None:
    """Draw the turns, newest first, with the figures and the trace of each answer beside it."""
    if not conversation.turns:
        st.caption(f"No request sent yet. {as_text(where_to_get_a_key(page))}")
        return
    for number, turn in reversed(list(enumerate(conversation.turns))):
        with st.container(border=True):
            draw_prompt(turn.prompt)
            for column, answer in zip(st.columns(len(turn.answers)), turn.answers, strict=True):
                with column:
                    is_newest = number == len(conversation.turns) - 1
                    draw_answer(page, answer, is_newest=is_newest, is_narrow=len(turn.answers) > 1)
    if st.button("New conversation", icon=":material/restart_alt:"):
        del st.session_state[CONVERSATION]
        st.rerun()


def where_to_get_a_key(page: Page) -> str:
    """Return what a person of this role does to get a key."""
    if session.may("keys.write"):
        return "Create a key on the Tenants page if you have none."
    if "my-keys" in page.others:
        return "Make a key on the page My keys if you have none."
    return "Ask an administrator for a key if you have none."


def draw_prompt(prompt: str) -> None:
    st.caption("Prompt")
    st.text(show_unseen(prompt))


def draw_answer(page: Page, answer: StreamedAnswer, *, is_newest: bool, is_narrow: bool) -> None:
    st.caption(as_text(answer.model))
    if answer.reasoning:
        with st.expander("Reasoning"):
            st.text(show_unseen(answer.reasoning))
    if answer.text:
        st.text(show_unseen(answer.text))  # a model's answer is not rendered as Markdown
    if answer.error:
        st.error(as_text(answer.error), icon=":material/block:")
    if not answer.request_id:
        return
    draw_figures(answer)
    if not is_newest:
        if answer.cost_nanodollars is not None:
            draw_known_cost(answer)
        return
    since_s = time.monotonic()
    page.live(lambda client: draw_details(client, page, answer, time.monotonic() - since_s, is_narrow=is_narrow))
