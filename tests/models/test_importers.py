"""Other people's checkpoints: files written by small re-implementations of each layout give the same logits, and any other file
is a sentence that says what it is, with nothing written and nothing of it run."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from streamlit.testing.v1 import AppTest
from torch import Tensor, nn
from torch.nn import functional as F

import workbench as wb
from models import checkpoint, files, foreign, importers, layouts
from models.config import GPTConfig
from models.corpus import Corpus, windows
from models.errors import WorkbenchError
from models.gpt import GPT
from models.hooked import vocabulary_of
from models.vocabulary import Vocabulary
from workbench import cli

V, T, D, L, H = 12, 7, 20, 2, 4  # no two sizes alike
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


# --- the foreign models, in our own words ----------------------------------------------------------------------------


def by_name(**parts: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(parts)


class JointAttention(nn.Module):
    """Queries, keys and values of all heads from one linear, and perhaps a mask that is kept as a buffer."""

    def __init__(self, bias: bool, mask: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D, bias=bias), nn.Linear(D, D, bias=bias)
        if mask:
            self.register_buffer("bias", torch.ones(T, T).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, D // H)).transpose(1, 2) for part in self.c_attn(x).split(D, dim=2))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(z.transpose(1, 2).flatten(2))


class Gpt2Names(nn.Module):
    """nanoGPT and minGPT, which give their parameters the names of GPT-2."""

    def __init__(self, bias: bool = True, mask: bool = False, tied: bool = True, activation: str = "gelu") -> None:
        super().__init__()
        self.act = ACTIVATIONS[activation]
        block = lambda: by_name(  # noqa: E731
            ln_1=nn.LayerNorm(D, bias=bias), attn=JointAttention(bias, mask), ln_2=nn.LayerNorm(D, bias=bias),
            mlp=by_name(c_fc=nn.Linear(D, 4 * D, bias=bias), c_proj=nn.Linear(4 * D, D, bias=bias)),
        )  # fmt: skip
        self.transformer = by_name(
            wte=nn.Embedding(V, D), wpe=nn.Embedding(T, D), h=nn.ModuleList(block() for _ in range(L)),
            ln_f=nn.LayerNorm(D, bias=bias),
        )  # fmt: skip
        self.lm_head = nn.Linear(D, V, bias=False)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight  # type: ignore[union-attr]

    def forward(self, idx: Tensor) -> Tensor:
        parts: Any = self.transformer
        x = parts.wte(idx) + parts.wpe(torch.arange(T))
        for block in parts.h:
            x = x + block.attn(block.ln_1(x))
            x = x + block.mlp.c_proj(self.act(block.mlp.c_fc(block.ln_2(x))))
        return self.lm_head(parts.ln_f(x))


class LectureHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(D, width, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.ones(T, T).tril())

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) * self.key.out_features**-0.5
        return scores.masked_fill(self.tril == 0, -torch.inf).softmax(-1) @ self.value(x)


class Lecture(nn.Module):
    """The video lecture's model: one module per head, biases everywhere but in the heads."""

    def __init__(self, heads: int = H, activation: str = "relu") -> None:
        super().__init__()
        self.act = ACTIVATIONS[activation]
        self.token_embedding_table, self.position_embedding_table = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(
            by_name(
                sa=by_name(heads=nn.ModuleList(LectureHead(D // heads) for _ in range(heads)), proj=nn.Linear(D, D)),
                ffwd=by_name(net=by_name(**{"0": nn.Linear(D, 4 * D), "2": nn.Linear(4 * D, D)})),
                ln1=nn.LayerNorm(D), ln2=nn.LayerNorm(D),
            )
            for _ in range(L)
        )  # fmt: skip
        self.ln_f, self.lm_head = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.token_embedding_table(idx) + self.position_embedding_table.weight[: idx.shape[1]]
        blocks: Any = self.blocks
        for block in blocks:
            normed = block.ln1(x)
            x = x + block.sa.proj(torch.cat([head(normed) for head in block.sa.heads], dim=-1))
            x = x + block.ffwd.net["2"](self.act(block.ffwd.net["0"](block.ln2(x))))
        return self.lm_head(self.ln_f(x))


def transformer_lens_model(activation: str = "gelu", **options: Any) -> Any:
    """TransformerLens' own; from its version 4 on there is none, and the file is one of an older version."""
    if int(version("transformer-lens").partition(".")[0]) >= 4:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    import transformer_lens as lens

    with pytest.warns(match="HookedTransformer is deprecated"):
        return lens.HookedTransformer(lens.HookedTransformerConfig(**dict(
            n_layers=L, d_model=D, n_ctx=T, n_heads=H, d_head=D // H, d_vocab=V, act_fn=activation, normalization_type="LN",
            device="cpu",
        ) | options))  # fmt: skip


def with_causal_masks(model: Any) -> Any:
    """Masks are whole in a state dict of older versions, and empty in one of 3.9."""
    for block in model.blocks:
        block.attn.mask = torch.ones(T, T, dtype=torch.bool).tril()
    return model


def randomised(model: nn.Module) -> nn.Module:
    """Nothing zero, no LayerNorm weight one, no two tensors alike; logits of a moderate size."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


# --- the files -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A foreign model and how it is saved and given."""

    make: Callable[[], Any]
    layout: str
    activation: str
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] | None = None  # nanoGPT's model_args
    prefix: str = ""
    note: str = ""

    def write(self, path: Path) -> Any:
        """Save the model as its people would; return it."""
        model = randomised(self.make())
        state = {self.prefix + name: tensor for name, tensor in model.state_dict().items()}
        if path.suffix == ".safetensors":
            save_file({name: tensor.clone() for name, tensor in state.items()}, path)
        elif self.arguments is not None:
            sizes = {"n_layer": L, "n_head": H, "n_embd": D, "block_size": T, "vocab_size": V, "dropout": 0.2}
            torch.save(
                {"model": state, "model_args": sizes | self.arguments, "optimizer": {"state": {}, "param_groups": []},
                 "iter_num": 4000, "best_val_loss": torch.tensor(1.4697), "config": {"dataset": "shakespeare_char"}},
                path,
            )  # fmt: skip
        else:
            torch.save(state, path)
        return model


UNTIED = dict(mask=True, tied=False)
CASES = {
    "nanoGPT": Case(Gpt2Names, "nanoGPT", "gelu", {}, {"bias": True}, note="exact GELU, as nanoGPT has had it since May 2023"),
    "nanoGPT without biases": Case(lambda: Gpt2Names(bias=False), "nanoGPT", "gelu", {}, {"bias": False}),
    "nanoGPT compiled": Case(Gpt2Names, "nanoGPT", "gelu", {}, {"bias": True}, prefix="_orig_mod."),
    "nanoGPT with masks": Case(lambda: Gpt2Names(mask=True), "nanoGPT", "gelu", {}, {"bias": True}),
    "nanoGPT of early 2023": Case(
        lambda: Gpt2Names(activation="gelu_new"), "nanoGPT", "gelu_new", {"activation": "gelu_new"}, {"bias": True},
        note="GELU's tanh approximation, as asked for",
    ),
    "nanoGPT before biases": Case(
        lambda: Gpt2Names(mask=True, activation="gelu_new"), "nanoGPT", "gelu_new", {}, {}, note="before its option `bias`"
    ),
    "nanoGPT of 2022, untied": Case(
        lambda: Gpt2Names(**UNTIED, activation="gelu_new"), "nanoGPT", "gelu_new", {}, {}, note="before its option `bias`"
    ),
    "nanoGPT bare": Case(Gpt2Names, "nanoGPT", "gelu", {"heads": H}, note="because the unembedding is the token embedding"),
    "nanoGPT bare, untied": Case(
        lambda: Gpt2Names(bias=False, tied=False), "nanoGPT", "gelu", {"heads": H}, note="because there are no biases"
    ),
    "minGPT": Case(
        lambda: Gpt2Names(**UNTIED, activation="gelu_new"), "minGPT", "gelu_new", {"heads": H},
        note="taken for minGPT's, because there are biases, and an unembedding of its own",
    ),
    "minGPT with exact GELU": Case(lambda: Gpt2Names(**UNTIED), "minGPT", "gelu", {"heads": H, "activation": "gelu"}),
    "lecture": Case(Lecture, "the video lecture's gpt.py", "relu", note="divided by √d_head, as in the lecture's published code"),
    "lecture, distributed": Case(Lecture, "the video lecture's gpt.py", "relu", prefix="module."),
    "lecture, one head": Case(lambda: Lecture(1), "the video lecture's gpt.py", "relu"),
    "lecture, GELU": Case(lambda: Lecture(activation="gelu"), "the video lecture's gpt.py", "gelu", {"activation": "gelu"}),
    "TransformerLens": Case(transformer_lens_model, "TransformerLens", "gelu", note="assumed, because the file does not tell"),
    "TransformerLens, tanh": Case(
        lambda: transformer_lens_model("gelu_new"), "TransformerLens", "gelu_new", {"activation": "gelu_new"}
    ),
    "TransformerLens before 3.9": Case(
        lambda: with_causal_masks(transformer_lens_model("relu")), "TransformerLens", "relu", {"activation": "relu"}
    ),
    "TransformerLens, attention only": Case(lambda: transformer_lens_model(attn_only=True), "TransformerLens", "gelu"),
}  # fmt: skip


@pytest.fixture
def meta(tmp_path: Path, vocabulary: Vocabulary) -> Path:
    """nanoGPT's `meta.pkl` for the twelve characters, in another order than that of their code points."""
    characters = list(reversed(vocabulary.characters))
    path = tmp_path / "data" / "meta.pkl"
    path.parent.mkdir()
    itos = dict(enumerate(characters))
    path.write_bytes(pickle.dumps({"vocab_size": V, "itos": itos, "stoi": {c: n for n, c in itos.items()}}))
    return path


@pytest.fixture
def text(tmp_path: Path, corpus_text: str) -> Path:
    path = tmp_path / "input.txt"
    path.write_text(corpus_text)
    return path


@pytest.fixture
def nanogpt(tmp_path: Path) -> Path:
    """A nanoGPT checkpoint, without its characters."""
    path = tmp_path / "ckpt.pt"
    CASES["nanoGPT"].write(path)
    return path


def difference(model: Any, theirs: Any) -> float:
    """Largest difference of logits in float64 between an imported model and the module that wrote the file."""
    idx = torch.randint(V, (5, T))
    with torch.no_grad():
        return (model.to(torch.float64)(idx) - theirs.to(torch.float64)(idx)).abs().max().item()


def workbench(capsys: Any, monkeypatch: Any, *arguments: Any) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line."""
    monkeypatch.setattr(sys, "argv", ["workbench", *map(str, arguments)])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- what can be read ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_imported_model_has_the_logits_of_the_module_that_wrote_the_file(case, ending, tmp_path, meta):
    path, options = tmp_path / f"file{ending}", dict(case.options)
    theirs = case.write(path)
    if ending == ".safetensors" and case.arguments is not None:  # which cannot hold model_args
        options |= {"heads": H, "activation": case.activation}
    model = wb.load(path, vocabulary=meta, **options)
    assert theirs(torch.zeros(1, T, dtype=torch.long)).abs().max() > 1
    assert difference(model, theirs) <= 1e-10
    assert model.cfg.act_fn == case.activation or model.cfg.attn_only
    assert vocabulary_of(model).characters == tuple("jihgfedcba \n")
    told = model.checkpoint.training
    if ending == ".pt":
        assert told["imported_from"]["layout"] == case.layout
        assert case.note in " ".join(told["notes"])
        claims = {"iter_num": 4000, "best_val_loss": pytest.approx(1.4697)}
        assert told["claims"] == (claims if case.arguments is not None else {})
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("data", path.name)] == []


def test_tied_stays_tied_and_biases_that_are_not_there_are_not_invented(tmp_path, meta):
    path = tmp_path / "ckpt.pt"
    CASES["nanoGPT without biases"].write(path)
    config = wb.load(path, vocabulary=meta).checkpoint.config
    sizes = dict(d_vocab=V, n_ctx=T, d_model=D, n_layers=L, n_heads=H, dropout=0.2, dropout_attention=0.2)
    none = dict.fromkeys(("bias_attention", "bias_mlp", "bias_norm"), False)
    assert config == GPTConfig(**sizes, **none, tied=True)


def test_weights_in_float64_are_rounded_and_in_float16_are_not(tmp_path, meta):
    for dtype, note in ((torch.float64, "29 tensors in float64 were rounded to float32"), (torch.float16, "")):
        model = randomised(Gpt2Names(**UNTIED)).to(dtype)
        if dtype == torch.float64:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter /= 3
        torch.save(model.state_dict(), tmp_path / "model.pt")
        imported = wb.load(tmp_path / "model.pt", vocabulary=meta, heads=H, activation="gelu")
        assert difference(imported, model.float()) <= 1e-10
        assert [n for n in imported.checkpoint.training["notes"] if "rounded" in n] == ([note] if note else [])


# --- where the characters come from ----------------------------------------------------------------------------------


def test_characters_come_from_the_meta_given_then_the_text_then_the_meta_beside(nanogpt, meta, text, vocabulary):
    reverse = tuple(reversed(vocabulary.characters))
    assert vocabulary_of(wb.load(nanogpt, vocabulary=meta, data=text)).characters == reverse
    (nanogpt.parent / "meta.pkl").write_bytes(meta.read_bytes())
    assert vocabulary_of(wb.load(nanogpt, data=text)) == vocabulary
    beside = wb.load(nanogpt)
    assert vocabulary_of(beside).characters == reverse
    assert beside.checkpoint.training["notes"][-1] == "characters: those of meta.pkl beside the file"


def test_line_ends_are_read_as_nanogpt_reads_them(nanogpt, text, vocabulary, tmp_path):
    """Python's text mode makes a newline of any; the loss is measured on the same text."""
    plain, out = importers.bring(nanogpt, tmp_path / "plain", data=text), {}
    for name, end in (("dos", b"\r\n"), ("old mac", b"\r")):
        (tmp_path / name).write_bytes(text.read_bytes().replace(b"\n", end))
        out[name] = importers.bring(nanogpt, tmp_path / f"{name} out", data=tmp_path / name)
    assert [found.vocabulary for found in (plain, *out.values())] == [vocabulary] * 3
    assert len({found.training["validation_loss"] for found in (plain, *out.values())}) == 1


def test_a_list_of_characters_will_do_as_meta(tmp_path, vocabulary):
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": list(vocabulary.characters)}, protocol=0))
    assert files.read_meta(tmp_path / "meta.pkl") == vocabulary


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [CASES["nanoGPT"], CASES["minGPT"], CASES["lecture"], CASES["TransformerLens"]], ids=lambda c: c.layout
)
def test_import_writes_a_checkpoint_on_which_everything_works(case, tmp_path, text, corpus_text, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "INSTALLED", tmp_path / "none")
    theirs, out = case.write(Path("theirs.pt")), Path("checkpoints/mine")
    options = [f"--{name}={value}" for name, value in case.options.items()]
    code, printed, err = workbench(capsys, monkeypatch, "import", "theirs.pt", "--data", text, "--out", out, *options)
    assert (code, err) == (0, "")
    assert f"theirs.pt: {case.layout}, sha256 " in printed
    assert "(at most 1e-10)" in printed
    assert case.note in printed
    assert ("best_val_loss 1.4697 (estimated on random batches)" in printed) == (case.arguments is not None)
    assert printed.endswith(f"\n{out}\n")

    told = json.loads((out / checkpoint.CONFIG).read_text())["training"]
    assert told["imported_from"].keys() == {"file", "sha256", "layout"}
    assert told["largest_difference_of_logits"] <= 1e-10
    ids = Vocabulary.of(corpus_text).encode(Corpus("", corpus_text, "").split("validation"))
    inputs, targets = (torch.from_numpy(part) for part in windows(ids, T))
    with torch.no_grad():
        loss = F.cross_entropy(theirs.float()(inputs).flatten(0, 1), targets.flatten()).item()
    assert told["validation_loss"] == pytest.approx(loss, abs=1e-4)
    assert f"validation loss: {told['validation_loss']:.4f} nats per character over the last 10 % of input.txt" in printed
    assert difference(wb.load(out), theirs) <= 1e-10

    assert "checkpoints/mine" in workbench(capsys, monkeypatch, "list")[1]
    code, printed, _ = workbench(capsys, monkeypatch, "verify", "mine", "--data", text)
    assert (code, printed.count("pass")) == (0, 8)
    code, _, err = workbench(capsys, monkeypatch, "card", "mine", "--data", text)
    assert code == 0, err
    card = (out / "README.md").read_text()
    assert "Imported, not trained here." in card
    assert told["imported_from"]["sha256"] in card


def test_the_page_opens_on_an_imported_checkpoint(nanogpt, meta, tmp_path):
    def page(folder: str) -> None:
        from workbench.dashboard import home

        home.show(folder, {})

    importers.bring(nanogpt, tmp_path / "mine", vocabulary=meta)
    test = AppTest.from_function(page, kwargs={"folder": str(tmp_path / "mine")}, default_timeout=60).run()
    assert not test.exception
    assert [element.value for element in test.error] == []


def test_one_of_our_folders_is_checked_and_copied(tmp_path, random_gpt, vocabulary, text, capsys, monkeypatch):
    ours = checkpoint.save(tmp_path / "ours", random_gpt.float(), vocabulary, "baby", training={"device": "abacus"})
    (ours / "notes.txt").write_text("kept")
    for source, out in ((ours, tmp_path / "copy"), (ours / checkpoint.WEIGHTS, tmp_path / "again")):
        code, printed, err = workbench(capsys, monkeypatch, "import", source, "--out", out, "--data", text)
        assert (code, err) == (0, "")
        assert "one of our checkpoints, copied" in printed
        assert "(at most 1e-10)" in printed
        assert "validation loss: " in printed
        assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in ours.iterdir()}
    assert wb.load(ours / checkpoint.WEIGHTS).checkpoint.path == ours


# --- what cannot be read ---------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled by a careless reader it makes a folder called `executed` in the working directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def state_of(case: str = "nanoGPT") -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in randomised(CASES[case].make()).state_dict().items()}


def saved(content: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def changed(case: str, change: Callable[[dict[str, Tensor]], Any], **arguments: Any) -> bytes:
    """A file of a case after a change to its state dict; with model_args if there are any."""
    state = state_of(case)
    change(state)
    sizes = {"n_layer": L, "n_head": H, "n_embd": D, "block_size": T, "vocab_size": V, "bias": True}
    return saved({"model": state, "model_args": sizes | arguments} if CASES[case].arguments is not None else state)


def with_value(name: str, value: float) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: state[name].view(-1)[2:3].fill_(value)


def with_tensor(name: str, *shape: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: state.update({name: torch.ones(shape)})


def without(part: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: [state.pop(name) for name in list(state) if part in name]


def with_tokens(number: int) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: state.update(dict.fromkeys(("transformer.wte.weight", "lm_head.weight"), torch.ones(number, D)))


def nothing(state: dict[str, Tensor]) -> None:
    """No change."""


QKV, FC = "transformer.h.1.attn.c_attn.weight", "transformer.h.0.mlp.c_fc.weight"
WRONG_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    # no weights at all
    "empty": (lambda: b"", "is an empty file; expected a file that torch.save or safetensors wrote"),
    "html": (lambda: b"<!DOCTYPE html><html>404</html>", "is an HTML or XML page"),
    "git-lfs": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-lfs pointer"),
    "noise": (lambda: b"\x00\x01" * 99, "is a file of an unknown kind"),
    "text": (lambda: b"First Citizen:\nBefore we proceed", "is a file of an unknown kind"),
    "truncated": (lambda: changed("nanoGPT", nothing)[:-500], "truncated, damaged or something else; fetch it again"),
    "truncated at once": (lambda: changed("nanoGPT", nothing)[:200], "truncated, damaged or something else"),
    "truncated, old format": (
        lambda: saved(state_of(), _use_new_zipfile_serialization=False)[:-90], "truncated, damaged or something else",
    ),
    "truncated safetensors": (lambda: (30).to_bytes(8, "little") + b'{"a"', "is a truncated or damaged safetensors file"),
    "another zip": (lambda: b"PK\x03\x04" + bytes(60), "cannot be read as a file of torch.save"),
    # pickles that would run code
    "bomb": (lambda: saved({"model": Bomb()}), "asks to run posix.mkdir on loading, so it was not opened"),
    "bomb, old format": (lambda: saved([Bomb()], _use_new_zipfile_serialization=False), "asks to run posix.mkdir on loading"),
    "bomb, bare pickle": (lambda: pickle.dumps(Bomb(), 2), "asks to run posix.mkdir on loading"),
    "bomb, new pickle": (lambda: pickle.dumps(Bomb(), 4), "is a Python pickle that torch.save did not write"),
    "whole module": (lambda: saved(nn.Linear(2, 2)), "asks to run torch.nn.modules.linear.Linear on loading"),
    # other contents
    "list": (lambda: saved([torch.ones(2)]), "holds a list; expected tensors by name: save model.state_dict()"),
    "number": (lambda: saved(3), "holds a int; expected tensors by name"),
    "no tensors": (lambda: saved({"lr": 0.1, "epochs": 3}), "holds no tensors, only the keys: 'lr', 'epochs'; expected"),
    "empty dict": (lambda: saved({}), "holds no tensors, only the keys: none"),
    "a number among tensors": (lambda: saved(state_of() | {"x": 3}), "'x' is a int; expected tensors by name only"),
    "sparse": (lambda: saved({"embed.W_E": torch.ones(2, 2).to_sparse()}), "'embed.W_E' is not a plain tensor of real numbers"),
    "complex": (lambda: saved({"embed.W_E": torch.ones(2, dtype=torch.complex64)}), "is not a plain tensor of real numbers"),
    "meta device": (lambda: saved({"embed.W_E": torch.ones(2, device="meta")}), "is not a plain tensor of real numbers"),
    # other layouts
    "unknown names": (
        lambda: saved({name: torch.ones(2) for name in "abcde"}),
        "holds 5 tensors ('a', 'b', 'c', …), whose names are of no layout known here; rename them as one of these",
    ),
    "bigram": (
        lambda: saved({"token_embedding_table.weight": torch.ones(V, V)}),
        "holds 1 tensors ('token_embedding_table.weight'); nearest is the layout of the video lecture's gpt.py (1 of 19 names in "
        "common), but 'position_embedding_table.weight' is missing",
    ),
    "our weights": (
        lambda: saved(GPT(GPTConfig(d_vocab=V, n_ctx=T, d_model=D, n_layers=1, n_heads=H)).state_dict()),
        "holds the weights of one of our checkpoints without their config.json; put both into one folder",
    ),
    "GPT-2 tokens": (lambda: changed("nanoGPT", with_tokens(50257)), "has 50,257 tokens, GPT-2's byte pairs, so it is not"),
    "GPT-2 tokens, rounded": (lambda: changed("minGPT", with_tokens(50304)), "has 50,304 tokens, GPT-2's byte pairs"),
    "folded LayerNorm": (
        lambda: saved({n: t for n, t in state_of("TransformerLens").items() if "ln" not in n}),
        "has no LayerNorm weights: they were folded into others, or the model had none",
    ),
    "RMS norm": (lambda: changed("TransformerLens", without("ln1.b")), "but 'blocks.0.ln1.b' is missing"),
    "gated MLP": (
        lambda: changed("TransformerLens", with_tensor("blocks.0.mlp.W_gate", D, 4 * D)), "'blocks.0.mlp.W_gate' has no place",
    ),
    "half an MLP": (lambda: changed("TransformerLens", without("1.mlp.W_in")), "but 'blocks.1.mlp.W_in' is missing"),
    # names and shapes
    "missing": (lambda: changed("nanoGPT", without(QKV)), f"(9 of 9 names in common), but '{QKV}' is missing"),
    "missing head": (
        lambda: changed("lecture", without("blocks.1.sa.heads.3.")), "but 'blocks.1.sa.heads.3.key.weight' is missing",
    ),
    "missing block": (lambda: changed("minGPT", without(".h.0.")), "but 'transformer.h.0.ln_1.weight' is missing"),
    "missing bias": (lambda: changed("nanoGPT", without("1.ln_2.bias")), "but 'transformer.h.1.ln_2.bias' is missing"),
    "a block far away": (
        lambda: changed("nanoGPT", with_tensor("transformer.h.999999.ln_1.weight", D)), "but 'transformer.h.2.ln_1.weight' is",
    ),
    "a head far away": (
        lambda: changed("lecture", with_tensor("blocks.999999.sa.heads.999999.key.weight", 5, D)), "sa.heads.4.key.weight' is",
    ),
    "no blocks": (lambda: changed("TransformerLens", without("blocks.")), "but 'blocks.0.ln1.w' is missing"),
    "with a prefix and without": (
        lambda: changed("lecture", with_tensor("module.lm_head.bias", V)), "holds 'lm_head.bias' twice, with a prefix and",
    ),
    "extra": (lambda: changed("nanoGPT", with_tensor("adapter.weight", 3)), "but 'adapter.weight' has no place in it"),
    "extra head": (lambda: changed("minGPT", with_tensor("lm_head.bias", V)), "but 'lm_head.bias' has no place in it"),
    "transposed": (
        lambda: changed("nanoGPT", with_tensor(QKV, D, 3 * D)),
        f"but '{QKV}' has shape (20, 60), and the workbench holds 3d × d only, where d = 20",
    ),
    "narrow MLP": (
        lambda: changed("nanoGPT", with_tensor(FC, 2 * D, D)), f"'{FC}' has shape (40, 20), and the workbench holds 4d × d only",
    ),
    "narrow MLP, TransformerLens": (
        lambda: saved(transformer_lens_model(d_mlp=3 * D).state_dict()),
        "'blocks.0.mlp.W_in' has shape (20, 60), and the workbench holds d × 4d only, where d = 20",
    ),
    "wide heads": (
        lambda: saved(transformer_lens_model(d_head=8).state_dict()),
        "it has 4 heads of width 8, and the workbench holds heads of width d / H only, where d = 20",
    ),
    "a vector as embedding": (
        lambda: changed("lecture", with_tensor("token_embedding_table.weight", 5)), "has shape (5,), and the workbench holds V",
    ),
    "no width": (lambda: changed("lecture", with_tensor("token_embedding_table.weight", V, 0)), "has shape (7, 20), and the"),
    "mask not causal": (
        lambda: changed("minGPT", with_tensor("transformer.h.1.attn.bias", 1, 1, T, T)), "bias' is not the causal mask",
    ),
    "local attention": (
        lambda: changed("TransformerLens", lambda state: state.update({"blocks.1.attn.mask": torch.eye(T, dtype=torch.bool)})),
        "'blocks.1.attn.mask' is not the causal mask, so this model attends otherwise",
    ),
    "model_args contradict": (lambda: changed("nanoGPT", nothing, n_layer=6), "model_args says n_layer = 6, the weights have 2"),
    "model_args with odd heads": (lambda: changed("nanoGPT", nothing, n_head=3), "got 3 heads; expected a divisor of its"),
    # values
    "nan": (lambda: changed("nanoGPT", with_value(QKV, torch.nan)), f"{QKV} holds values that are not finite"),
    "nan in the embedding": (
        lambda: changed("nanoGPT", with_value("transformer.wte.weight", torch.nan)), "wte.weight holds values that are not",
    ),
    "inf": (lambda: changed("lecture", with_value("lm_head.bias", -torch.inf)), "lm_head.bias holds values that are not finite"),
    "whole numbers": (
        lambda: changed("lecture", lambda state: state.update({"lm_head.bias": torch.ones(V, dtype=torch.int8)})),
        "'lm_head.bias' holds torch.int8, not weights; save the model in float32",
    ),
    "overflow": (
        lambda: saved(state_of("TransformerLens") | {"unembed.b_U": torch.full((V,), 1e200, dtype=torch.float64)}),
        "unembed.b_U holds values that are not finite",
    ),
}  # fmt: skip


def refused(capsys: Any, monkeypatch: Any, folder: Path, *arguments: Any) -> str:
    """The sentence with which an import fails; exit code 2, one line, nothing printed, run or written."""
    monkeypatch.chdir(folder)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}
    code, out, err = workbench(capsys, monkeypatch, "import", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("workbench: ")
    assert {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")} == before
    return err


@pytest.mark.parametrize(("write", "sentence"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_a_sentence_and_nothing_is_written(write, sentence, tmp_path, meta, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("their.pt").write_bytes(write())
    arguments = ("--vocabulary", meta, "--out", "checkpoints/mine")
    assert sentence in refused(capsys, monkeypatch, tmp_path, "their.pt", *arguments)
    with pytest.raises(WorkbenchError) as error:
        wb.load("their.pt", vocabulary=meta)
    assert sentence in str(error.value)
    assert not Path("executed").exists()


META: dict[str, tuple[Callable[[], bytes], str]] = {
    "bomb": (lambda: pickle.dumps({"itos": Bomb()}), "is a Python pickle that cannot be read as a vocabulary (it asks to run"),
    "bare bomb": (lambda: pickle.dumps(Bomb(), 0), "it asks to run posix.mkdir on loading"),
    "builtin": (lambda: b"c__builtin__\neval\n(S'1'\ntR.", "it asks to run __builtin__.eval on loading"),
    "truncated": (lambda: pickle.dumps({"itos": dict(enumerate("abc"))})[:-9], "cannot be read as a vocabulary"),
    "empty": (lambda: b"", "is an empty file that cannot be read as a vocabulary"),
    "text": (lambda: b"First Citizen:", "is a file of an unknown kind that cannot be read as a vocabulary"),
    "list": (lambda: pickle.dumps(["a"]), "holds no itos, the characters by id from 0"),
    "no itos": (lambda: pickle.dumps({"vocab_size": 3}), "holds no itos"),
    "gap": (lambda: pickle.dumps({"itos": {0: "a", 2: "b"}}), "holds no itos"),
    "words": (lambda: pickle.dumps({"itos": {0: "the", 1: "a"}}), "a vocabulary holds single characters, got 'the'"),
    "numbers": (lambda: pickle.dumps({"itos": {0: 7, 1: "a"}}), "holds no itos"),
    "size": (lambda: pickle.dumps({"itos": {0: "a"}, "vocab_size": 2}), "itos, stoi and vocab_size contradict each other"),
    "stoi": (lambda: pickle.dumps({"itos": {0: "a"}, "stoi": {"a": 1}}), "itos, stoi and vocab_size contradict each other"),
    "too few": (lambda: pickle.dumps({"itos": {0: "a"}}), "meta.pkl has 1 characters, the model in ckpt.pt has 12; give the"),
}  # fmt: skip


@pytest.mark.parametrize("given", [True, False], ids=["given", "beside"])
@pytest.mark.parametrize(("write", "sentence"), META.values(), ids=META)
def test_a_wrong_meta_is_a_sentence_and_runs_nothing(write, sentence, given, nanogpt, tmp_path, capsys, monkeypatch):
    (tmp_path / "meta.pkl").write_bytes(write())
    options = ["--vocabulary", "meta.pkl"] if given else []
    assert sentence in refused(capsys, monkeypatch, tmp_path, "ckpt.pt", "--out", "mine", *options)
    assert not Path("executed").exists()


OUT, META_GIVEN = ("--out", "mine"), ("--vocabulary", "data/meta.pkl")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.pt", "--out", "mine"], "there is no file 'missing.pt'; give the path of a checkpoint"),
        (["ckpt.pt", *OUT], "ckpt.pt does not hold its characters; give nanoGPT's meta.pkl with --vocabulary"),
        (["ckpt.pt", *OUT, "--vocabulary", "none.pkl"], "the vocabulary 'none.pkl' cannot be read"),
        (["ckpt.pt", *OUT, "--vocabulary", "data"], "the vocabulary 'data' cannot be read (Is a directory)"),
        (["ckpt.pt", *OUT, "--data", "none.txt"], "cannot read the text 'none.txt'"),
        (["ckpt.pt", *OUT, "--data", "other.txt"], "other.txt has 3 characters, the model in ckpt.pt has 12"),
        (["ckpt.pt", *OUT, "--data", "data/meta.pkl"], "is not UTF-8"),
        (["ckpt.pt", *OUT, *META_GIVEN, "--data", "strange.txt"], "character 'Z' at place"),
        (["ckpt.pt", *OUT, *META_GIVEN, "--heads", "5"], "has 4 heads, got --heads 5; leave it out"),
        (["min.pt", *OUT, *META_GIVEN], "--heads (heads= in Python), a divisor of its width 20: 1, 2, 4, 5"),
        (["min.pt", *OUT, *META_GIVEN, "--heads", "3"], "got 3 heads; expected a divisor of its width"),
        (["min.pt", *OUT, *META_GIVEN, "--heads", "0"], "got 0 heads; expected a divisor of its width"),
        (["min.pt", *OUT, *META_GIVEN, "--heads", "-4"], "got -4 heads; expected a divisor"),
        (["ckpt.pt", "--out", "ours", *META_GIVEN], "ours exists already; give another folder with --out"),
        (["ckpt.pt", "--out", "other.txt", *META_GIVEN], "other.txt exists already"),
        (["ckpt.pt", "--out", "bare", *META_GIVEN], "bare exists already"),
        (["ckpt.pt", "--out", "other.txt/mine", *META_GIVEN], "other.txt/mine cannot be written (File exists: "),
        ([".", "--out", "mine"], "is a folder and not one of our checkpoints; give the file in it: ckpt.pt, min.pt"),
        (["bare", "--out", "mine"], "bare is a folder and not one of our checkpoints; give the path of a file"),
        (["ours", "--out", "mine", "--heads", "2"], "ours is one of our checkpoints, which knows its own vocabulary"),
        (["ours", "--out", "ours/mine"], "ours/mine lies inside ours, which is to be copied"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_wrong_option_is_a_sentence_and_nothing_is_written(
    arguments, sentence, nanogpt, meta, corpus_text, random_gpt, vocabulary, tmp_path, capsys, monkeypatch
):
    CASES["minGPT"].write(tmp_path / "min.pt")
    checkpoint.save(tmp_path / "ours", random_gpt, vocabulary)
    (tmp_path / "bare").mkdir()
    (tmp_path / "other.txt").write_text("abcabc" * 30)
    (tmp_path / "strange.txt").write_text(corpus_text + "Z")
    assert sentence in refused(capsys, monkeypatch, tmp_path, *arguments)


def test_a_model_that_would_differ_is_not_written(nanogpt, meta, tmp_path, capsys, monkeypatch):
    """The conversion is spoilt by 1e-9 in one bias."""
    genuine = importers.to_hooked

    def spoilt(gpt: GPT) -> Any:
        model = genuine(gpt)
        with torch.no_grad():
            model.unembed.b_U[3] += 1e-9
        return model

    monkeypatch.setattr(importers, "to_hooked", spoilt)
    sentence = refused(capsys, monkeypatch, tmp_path, "ckpt.pt", "--vocabulary", meta, "--out", "mine")
    assert "differ by 1e-09 in their logits, at most 1e-10 was expected; nothing was written" in sentence


@pytest.mark.parametrize("name", ["nanoGPT", "minGPT", "lecture", "TransformerLens"])
@pytest.mark.parametrize(("one", "other"), [("query", "key"), ("blocks.0", "blocks.1")])
def test_the_witness_of_every_layout_sees_weights_that_changed_places(name, one, other, meta, tmp_path, monkeypatch):
    """What our reading would do if it were wrong: the file's own tensors, read literally, tell."""
    genuine, swapped = checkpoint.fill, {one: other, other: one}

    def mistaken(gpt: GPT, tensors: dict[str, Tensor], source: Path) -> None:
        pattern = re.compile("|".join(re.escape(word) for word in swapped))
        genuine(gpt, {pattern.sub(lambda found: swapped[found[0]], key): tensor for key, tensor in tensors.items()}, source)

    CASES[name].write(tmp_path / "their.pt")
    monkeypatch.setattr(checkpoint, "fill", mistaken)
    with pytest.raises(WorkbenchError, match=r"the file's own tensors differ by [0-9]e[-+]0[01] in their logits"):
        wb.load(tmp_path / "their.pt", vocabulary=meta, **CASES[name].options)


@pytest.mark.parametrize("command", [["verify"], ["app", "--checkpoint"], ["card"]], ids=lambda words: words[0])
def test_other_commands_ask_for_the_import(command, nanogpt, capsys, monkeypatch):
    monkeypatch.setenv("WORKBENCH_DATA", __file__)
    code, _, err = workbench(capsys, monkeypatch, *command, nanogpt)
    assert code == 2
    assert f"import it first with `workbench import {nanogpt} --out checkpoints/NAME`" in err
    assert err.count("\n") == 1


def test_other_commands_point_from_our_weights_to_their_folder(tmp_path, random_gpt, vocabulary):
    ours = checkpoint.save(tmp_path / "ours", random_gpt, vocabulary)
    with pytest.raises(checkpoint.CheckpointError, match=f"give its folder {ours}$"):
        checkpoint.load(ours / checkpoint.WEIGHTS)


# --- the tables ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", foreign.LAYOUTS, ids=lambda layout: layout.name)
def test_every_row_of_a_table_is_read(layout):
    """Each has a name, and a shape in words that are known; only a mask may be a single number."""
    words = {word.lstrip("0123456789") for entry in layout.table for word in entry.shape}
    assert words <= {"V", "T", "d", "H", "d_head", ""}
    assert all(entry.shape or entry.group == "mask" for entry in layout.table)
    assert len({entry.pattern for entry in layout.table}) == len(layout.table) > 15


def test_a_name_matches_whole_and_by_number_only():
    (entry,) = layouts.table("blocks.N.sa.heads.M.key.weight  d_head × d")
    assert entry.regex.fullmatch("blocks.10.sa.heads.2.key.weight").groups() == ("10", "2")
    for name in ("blocks.1.sa.heads.x.key.weight", "xblocks.1.sa.heads.2.key.weight", "blocks.1.sa.heads.2.keyxweight"):
        assert entry.regex.fullmatch(name) is None
