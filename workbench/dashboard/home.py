"""The first page: what this is, where to begin, and the model itself: parameters, shapes, checks, training, its voice."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st
import torch

from analyses.catalogue import ANALYSES
from analyses.spec import GROUPS
from models.config import parameter_table
from models.gpt import sample
from workbench.dashboard import computing, page, state
from workbench.dashboard.computing import Loaded
from workbench.render.altair import chart
from workbench.render.plain import Axis, Curves

FIRST = {
    "logit-lens": "Watch the model make up its mind, layer by layer.",
    "attention-patterns": "See where every head looks, and click one: it stays chosen on all pages.",
    "ov-circuit": "Read the chosen head completely: what it does for every character.",
}


def show(started_with: str, pages: Mapping[str, Any]) -> None:
    """Draw the first page.

    Args:
        pages: Streamlit's page of every analysis, by slug.
    """
    page.guarded(partial(_show, started_with, pages))


def _show(started_with: str, pages: Mapping[str, Any]) -> None:
    loaded = page.opened("home", started_with)
    st.title("Look inside a tiny GPT", anchor=False)
    st.markdown(
        "#### A small language model that writes one character at a time, taken apart completely: every head, every pair of "
        "characters, every number checked."
    )
    if loaded is None:
        return
    state.write_address(state.values()["checkpoint"])
    config = loaded.checkpoint.config
    total = sum(term.parameters for term in parameter_table(config))
    st.markdown(
        f"The model **{page.plain(loaded.checkpoint.name)}** reads up to {config.n_ctx} characters out of {config.d_vocab}, has "
        f"{config.n_layers} blocks of {config.n_heads} heads and {total:,} parameters. Pages for every analysis are in the bar "
        "at the top. What they share, the text and the chosen head, is in the sidebar and in the address: every view is a link."
    )
    _first_steps(pages)
    _everything(pages)
    _model(loaded)


def _first_steps(pages: Mapping[str, Any]) -> None:
    st.subheader("Begin here", anchor=False)
    for number, (column, (slug, told)) in enumerate(zip(st.columns(len(FIRST)), FIRST.items(), strict=True), start=1):
        with column, st.container(border=True, height="stretch"):
            st.markdown(f"**{number}.** {told}")
            if slug in pages:
                st.page_link(pages[slug], icon=":material/arrow_forward:")


def _everything(pages: Mapping[str, Any]) -> None:
    with st.expander("All analyses"):
        for group in GROUPS:
            st.markdown(f"**{group}**")
            for analysis in ANALYSES:
                if analysis.group == group:
                    link, told = st.columns([1, 3], vertical_alignment="center")
                    if analysis.slug in pages:
                        link.page_link(pages[analysis.slug])
                    told.markdown(page.markdown(analysis.summary))


def _model(loaded: Loaded) -> None:
    st.subheader("The model", anchor=False)
    parts = {
        "Let it write": _sample, "Parameters": _parameters, "Shapes": _shapes, "Training": _training,
        "Model card": _card, "Self-check": _checks,
    }  # fmt: skip
    for tab, draw in zip(st.tabs(list(parts)), parts.values(), strict=True):
        with tab:
            page.guarded(partial(draw, loaded))


def _sample(loaded: Loaded) -> None:
    left, right = st.columns([1, 2], gap="large")
    with left, st.form("sample", border=False):
        prompt = st.text_area("Prompt", state.readable("KING RICHARD III:\n", loaded), height=90)
        temperature = st.slider("Temperature: lower is sharper, 0 takes the likeliest", 0.0, 2.0, 0.8, 0.1)
        length = st.slider("Characters to write", 50, 500, 300, 50)
        seed = st.number_input("Seed: the same seed, the same text", 0, 2**31 - 1, 1, 1)
        wanted = st.form_submit_button("Let it write", type="primary")
    if wanted:
        with right:
            st.session_state["written"] = loaded.id, _written(loaded, prompt, length, temperature, seed)
    id, text = st.session_state.get("written", ("", ""))
    if id == loaded.id:
        right.code(text, language=None, wrap_lines=True)


def _written(loaded: Loaded, prompt: str, length: int, temperature: float, seed: int) -> str:
    """A prompt and what the model writes after it, with a bar while it does; leaving the page stops it."""
    vocabulary, gpt = loaded.checkpoint.vocabulary, loaded.checkpoint.gpt
    bar = st.progress(0.0, "Writing …")
    idx = torch.from_numpy(vocabulary.encode(prompt))[None]

    def logits_of(ids: torch.Tensor) -> torch.Tensor:
        bar.progress(min(1.0, step() / length), "Writing …")
        return gpt(ids)[0]

    step = count().__next__
    with torch.no_grad():
        written = sample(logits_of, idx, gpt.config.n_ctx, length, temperature, None, seed)
    bar.empty()
    return vocabulary.decode(written[0].tolist())


def _parameters(loaded: Loaded) -> None:
    config = loaded.checkpoint.config
    terms = parameter_table(config)
    total = sum(term.parameters for term in terms)
    counted = sum(parameter.numel() for parameter in loaded.checkpoint.gpt.parameters())
    rows = [(term.name, term.formula, f"{term.parameters:,}", f"{term.parameters / total:.1%}") for term in terms]
    _table(("part", "formula", "parameters", "share"), [*rows, ("**sum**", "", f"**{total:,}**", "100%")], "llrr")
    st.caption(
        f"V = {config.d_vocab} characters, T = {config.n_ctx} positions, d = {config.d_model}, L = {config.n_layers} blocks, "
        f"H = {config.n_heads} heads. Counted in the model itself: {counted:,}."
    )


def _shapes(loaded: Loaded) -> None:
    st.markdown("What a forward pass of one text of full length computes, in order, under TransformerLens' names.")
    stages = computing.shapes(loaded)
    table = pd.DataFrame(
        [(stage.name, " × ".join(map(str, stage.shape)), stage.axes.replace(" ", " × ")) for stage in stages],
        columns=["stage", "shape", "axes"],
    )
    st.dataframe(table, hide_index=True, height=460, row_height=32)


def _training(loaded: Loaded) -> None:
    path = loaded.path / "training.csv"
    if not path.is_file():
        st.markdown("This checkpoint has no record of its training (`training.csv`).")
        return
    record = pd.read_csv(path)
    steps = record["step"].to_numpy(float)
    keys = tuple(str(step) for step in record["step"])
    curves = tuple((name, record[f"{name}_loss"].to_numpy(float)) for name in ("training", "validation"))
    found = Curves("Loss while training", Axis("step", "step", keys, keys), steps, "nats per character", "", (("", curves),))
    st.altair_chart(chart(found), width="stretch", theme=None)
    best = record["validation_loss"].min()
    chance = np.log(loaded.checkpoint.config.d_vocab)
    st.caption(f"Lowest validation loss {best:.4f} nats per character; guessing blindly costs ln V = {chance:.2f}.")


def _card(loaded: Loaded) -> None:
    path = loaded.path / "README.md"
    if not path.is_file():
        st.markdown("This checkpoint has no model card. `workbench card NAME` measures and writes one.")
        return
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", path.read_text(encoding="utf-8"))  # no image is fetched from anywhere
    text = re.sub(r"\A# .*\n", "", text)  # its title is the page's
    st.markdown(page.markdown(re.sub(r"(?m)^## ", "#### ", text)))


def _checks(loaded: Loaded) -> None:
    marks = {True: ":green[holds]", False: ":red[**fails**]", None: "not measured"}
    rows = [
        (marks[check.passed], page.plain(check.name), page.plain(check.measured), page.plain(check.expected))
        for check in computing.checked(loaded)
    ]
    _table(("", "what must hold", "measured", "expected"), rows, "llll")


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], align: str) -> None:
    rule = ["---:" if side == "r" else ":---" for side in align]
    st.markdown("\n".join("| " + " | ".join(row) + " |" for row in [head, tuple(rule), *rows]))
