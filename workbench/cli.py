"""The command line. Heavy imports happen inside commands, so that `workbench --help` answers at once."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from models.errors import WorkbenchError

if TYPE_CHECKING:
    from analyses.spec import Analysis, Parameter
    from analyses.views import View
    from models.corpus import Corpus

app = typer.Typer(
    help="Look inside a tiny GPT: train it, take it apart, export what you see.", no_args_is_help=True, add_completion=False,
    pretty_exceptions_enable=False,
)  # fmt: skip
run_app = typer.Typer(help="Run an analysis and write its picture or its data.", no_args_is_help=True)
app.add_typer(run_app, name="run")

Data = Annotated[Path | None, typer.Option("--data", help="A UTF-8 text instead of Tiny Shakespeare.")]
CheckpointName = Annotated[str, typer.Option("--checkpoint", help="Name or folder of a checkpoint.")]


@run_app.callback()
def _run() -> None:
    """Run an analysis and write its picture (.svg .pdf .png) or its data (.csv .nc)."""


# --- looking ---------------------------------------------------------------------------------------------------------


@app.command("list")
def list_checkpoints() -> None:
    """List the checkpoints at hand."""
    from models.checkpoint import available, load
    from models.config import parameter_count
    from models.run import recorded_loss

    for name, path in available().items():
        found, loss = load(path), recorded_loss(path)
        told = "" if loss is None else f"validation loss {loss:.4f}"
        typer.echo(f"{name:20} {parameter_count(found.config):>12,} parameters   {told:24} {path}")


@app.command()
def analyses() -> None:
    """List the analyses."""
    from analyses.catalogue import ANALYSES

    for analysis in ANALYSES:
        typer.echo(f"{analysis.slug:22} {analysis.summary}")


@app.command()
def verify(name: Annotated[str, typer.Argument(help="Name or folder of a checkpoint.")] = "baby", data: Data = None) -> None:
    """Check a checkpoint: parity, causality, simplex, parameter count, validation loss. Exit code 1 if one fails."""
    from models import checkpoint, checks

    results = checks.verify(checkpoint.load(name), _corpus_at_hand(data))
    marks = {True: "pass", False: "FAIL", None: "  – "}
    for check in results:
        typer.echo(f"{marks[check.passed]}  {check.name}: {check.measured}" + (f"  [{check.expected}]" if check.expected else ""))
    if any(check.passed is False for check in results):
        raise typer.Exit(1)


def _corpus_at_hand(data: Path | None) -> Corpus | None:
    """The given text, or one that needs no network; None if there is none."""
    from models import corpus

    if data is not None or os.environ.get(corpus.VARIABLE):
        return corpus.load(data)
    with suppress(corpus.CorpusError):
        return corpus.at_hand()
    return None


@app.command("corpus")
def fetch_corpus(data: Data = None) -> None:
    """Fetch Tiny Shakespeare into the cache, once, for what reads the whole text; or look at another text."""
    from models import corpus as corpora

    found = corpora.load(data)
    typer.echo(f"{found.name}: {len(found.text):,} characters, {len(found.vocabulary())} distinct, sha256 {found.sha256}")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help=r"Text to continue; \n is a line break.")] = r"\n",
    checkpoint: CheckpointName = "baby",
    length: Annotated[int, typer.Option(help="Characters to write.")] = 300,
    temperature: Annotated[float, typer.Option(help="Lower is sharper; 0 takes the likeliest character.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Choose among the k likeliest only.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the text repeatable.")] = None,
) -> None:
    """Let a model write."""
    from models import hooked

    typer.echo(hooked.generate(hooked.load(checkpoint), _typed(prompt), length, temperature, top_k, seed))


@app.command("import")
def import_checkpoint(
    file: Annotated[Path, typer.Argument(help="A .pt or .safetensors file of nanoGPT, minGPT, the lecture or TransformerLens.")],
    out: Annotated[Path, typer.Option(help="Folder to write, as in checkpoints/NAME.")],
    vocabulary: Annotated[Path | None, typer.Option(help="nanoGPT's meta.pkl; the one beside the file unless given.")] = None,
    data: Annotated[Path | None, typer.Option(help="The text it was trained on: its characters, its validation loss.")] = None,
    heads: Annotated[int | None, typer.Option(help="How many, where the file does not tell.")] = None,
    activation: Annotated[Literal["gelu", "gelu_new", "relu"] | None, typer.Option(help="The layout's own unless given.")] = None,
) -> None:
    """Turn somebody else's checkpoint into one of ours, after proof that both compute the same."""
    from models import importers

    found = importers.bring(file, out, vocabulary=vocabulary, data=data, heads=heads, activation=activation)
    for line in [*importers.report(found), str(found.path)]:
        typer.echo(line)


Knobs = Annotated[list[str], typer.Option("--knob", help="A knob of the analysis, as name=value; may be repeated.")]
Out = Annotated[Path, typer.Option("--out", help="File to write; its ending says the format: .svg .pdf .png .csv .nc")]
Panel = Annotated[int, typer.Option("--panel", help="Which of the page's pictures, from 1.")]


@app.command()
def compare(
    analysis: Annotated[str, typer.Argument(help="Which analysis; `workbench analyses` lists them.")],
    out: Out,
    checkpoint: CheckpointName = "baby",
    second: Annotated[str | None, typer.Option(help="Another checkpoint; the same one unless given.")] = None,
    knob: Knobs = [],  # noqa: B006 (typer's way)
    second_knob: Annotated[list[str], typer.Option(help="What differs in the second, as name=value.")] = [],  # noqa: B006
    panel: Panel = 1,
    data: Data = None,
) -> None:
    """Two checkpoints, or two texts, side by side in one picture, and their difference."""
    from analyses import compare as comparison
    from analyses.catalogue import find
    from models.hooked import load
    from workbench import figures

    figures.check_format(out)
    _reading(data)
    chosen = find(analysis)
    knobs = _given_knobs(chosen, knob)
    with _bar():
        one = chosen(load(checkpoint), **knobs)
        two = chosen(load(second or checkpoint), **knobs | _given_knobs(chosen, second_knob))
    view = _panel(chosen.fitting_views(one), panel)
    typer.echo(figures.save(comparison.compare(one, two, view), out, view))


@app.command()
def over_training(
    analysis: Annotated[str, typer.Argument(help="Which analysis; `workbench analyses` lists them.")],
    out: Out,
    film: Annotated[str, typer.Option(help="Name or folder of a film.")] = "baby-film",
    at: Annotated[list[str], typer.Option(help="A slice to keep, as dimension=value; may be repeated.")] = [],  # noqa: B006
    knob: Knobs = [],  # noqa: B006
    panel: Panel = 1,
    data: Data = None,
) -> None:
    """An analysis at every kept moment of a training run: how a circuit forms."""
    from analyses import over_training as following
    from analyses.catalogue import find
    from workbench import figures

    figures.check_format(out)
    _reading(data)
    chosen = find(analysis)
    places = {name: int(value) if value.isdecimal() else value for name, value in map(_pair, at)}
    with _bar():
        dataset = following.over_training(chosen, film, at=places, **_given_knobs(chosen, knob))
    typer.echo(figures.save(dataset, out, _panel(following.views(dataset), panel)))


def _pair(text: str) -> tuple[str, str]:
    from analyses.spec import KnobError

    name, equals, value = text.partition("=")
    if not equals:
        raise KnobError(f"got {text!r}; expected name=value")
    return name, _typed(value)


def _given_knobs(analysis: Analysis, texts: list[str]) -> dict[str, Any]:
    """Knobs from name=value, each in its own type; what is wrong with a value the analysis itself says."""
    found: dict[str, Any] = {}
    for name, value in map(_pair, texts):
        parameter = analysis.parameters.get(name)
        kind = parameter.type if parameter else str
        try:
            found[name] = {"true": True, "false": False}.get(value, value) if kind is bool else kind(value)
        except ValueError:
            found[name] = value
    return found


def _panel(views: Sequence[View], panel: int) -> View:
    from workbench import figures

    if not 1 <= panel <= len(views):
        titles = "; ".join(f"{number} {view.title}" for number, view in enumerate(views, 1))
        raise figures.FormatError(f"panel {panel} is not among this result's pictures; give one of: {titles}")
    return views[panel - 1]


# --- training --------------------------------------------------------------------------------------------------------


@app.command()
def train(
    preset: Annotated[str, typer.Argument(help="Which model; `workbench presets` lists them.")],
    data: Data = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    iterations: Annotated[int | None, typer.Option(help="Steps; the preset's own number unless given.")] = None,
    optimiser: Annotated[Literal["muon", "adamw"] | None, typer.Option(help="The preset's own unless given.")] = None,
    seed: Annotated[int | None, typer.Option(help="The preset's own unless given.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Windows a step (of each process); the preset's own unless given.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="The preset's own unless given.")] = None,
    dropout_attention: Annotated[float | None, typer.Option(help="The preset's own unless given; 0 is much faster.")] = None,
    precision: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Of forward and backward; auto is bfloat16 on CUDA.")
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder to write; checkpoints/PRESET unless given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last save in the folder.")] = False,
    film: Annotated[bool, typer.Option("--film", help="Keep the preset's moments too, in the folder OUT-film.")] = False,
) -> None:
    """Train a preset and write a checkpoint with its model card. Ctrl-C stops it; --resume goes on exactly.

    Several processes train one model with `torchrun --nproc-per-node=N -m workbench train PRESET`.
    """
    from models import card, training
    from models import corpus as corpora
    from models import film as films
    from models.config import PRESETS, ConfigError
    from models.parallel import this_process
    from models.run import film_of

    if preset not in PRESETS:
        raise ConfigError(f"there is no preset {preset!r}; give one of: {', '.join(PRESETS)}")
    chosen, corpus, folder = PRESETS[preset], corpora.load(data), out or Path("checkpoints") / preset
    config, recipe = training.with_options(
        *chosen, iterations=iterations, optimiser=optimiser, seed=seed, batch_size=batch_size, dropout=dropout,
        dropout_attention=dropout_attention,
    )  # fmt: skip
    try:
        training.train(
            config, recipe, corpus, folder, preset=preset, device=device, precision=precision, resume=resume, film=film
        )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo(f"\nStopped. The last save is whole; go on with the same command and --resume (folder {folder}).", err=True)
        raise typer.Exit(130) from None
    if this_process().is_first:
        typer.echo(f"Trained: {folder}. Measuring statistics and heads for its card …", err=True)
        typer.echo(card.write(folder, corpus))
        if film:
            typer.echo(films.write(film_of(folder), corpus))


@app.command()
def ladder(
    data: Data = None,
    iterations: Annotated[int | None, typer.Option(help="Steps of each; the presets' own number unless given.")] = None,
    seed: Annotated[int | None, typer.Option(help="The presets' own unless given.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write the models and the table to.")] = Path("checkpoints"),
) -> None:
    """Train the course's models 4.2 to 4.10 alike, as far as they are not there, and tabulate what each piece buys."""
    from models import corpus as corpora
    from models import ladder as ladders

    path = ladders.climb(out, corpora.load(data), iterations=iterations, seed=seed)
    typer.echo(path.read_text(encoding="utf-8"))


@app.command()
def presets() -> None:
    """List the models that can be trained."""
    from models.config import PRESETS, parameter_count

    for name, preset in PRESETS.items():
        c = preset.model
        sizes = f"V {c.d_vocab}, T {c.n_ctx}, d {c.d_model}, L {c.n_layers}, H {c.n_heads}"
        typer.echo(f"{name:20} {parameter_count(c):>12,} parameters   {sizes}")


@app.command()
def card(
    name: Annotated[str, typer.Argument(help="Name or folder of a checkpoint.")],
    data: Data = None,
    beside: Annotated[str | None, typer.Option(help="A checkpoint of another recipe to compare heads with.")] = None,
) -> None:
    """Measure a checkpoint's statistics and write its model card."""
    from models import card as cards
    from models import corpus as corpora

    typer.echo(cards.write(name, corpora.load(data), beside))


# --- the dashboard ---------------------------------------------------------------------------------------------------


@app.command("app")
def dashboard(
    port: Annotated[int, typer.Option(help="Port on this machine.")] = 8501,
    checkpoint: CheckpointName = "baby",
    browser: Annotated[bool, typer.Option(help="Open a browser window.")] = True,
    data: Data = None,
) -> None:
    """Open the dashboard in the browser. It listens on this machine only and sends nothing anywhere."""
    from models.checkpoint import find

    _reading(data)
    path = find(checkpoint)
    entry = Path(__file__).parent / "dashboard" / "app.py"
    options = {
        "server.address": "127.0.0.1",
        "server.port": port,
        "server.headless": "false" if browser else "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "none",
        "theme.base": "light",
        "theme.primaryColor": "#0072b2",
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "streamlit",
        "run",
        str(entry),
        *(f"--{key}={value}" for key, value in options.items()),
    ]
    name = checkpoint if path.name == checkpoint else str(path)
    try:
        code = subprocess.call([*command, "--", "--checkpoint", name])
    except KeyboardInterrupt:
        code = 0
    raise typer.Exit(code)


# --- running analyses: commands made from the signatures -------------------------------------------------------------


def command_line(analysis: Analysis, checkpoint: str, knobs: Mapping[str, Any], out: str, panel: int = 1) -> str:
    """The `workbench run` line that reproduces a result, or one of its pictures, counted from 1."""
    parts = ["workbench", "run", analysis.slug, "--checkpoint", checkpoint]
    for name, value in knobs.items():
        option = analysis.parameters[name].option
        if isinstance(value, bool):
            parts.append(option if value else option.replace("--", "--no-", 1))
        elif value is not None:
            parts += [option, _shown(value)]
    parts += ["--panel", str(panel)] if panel > 1 else []
    return " ".join(shlex.quote(part) for part in [*parts, "--out", out])


def _shown(value: Any) -> str:
    return value.replace("\n", r"\n") if isinstance(value, str) else str(value)


def _typed(text: str) -> str:
    return text.replace(r"\n", "\n")


def _command(analysis: Analysis) -> Callable[..., None]:
    """A function whose signature is the analysis' knobs as options, for typer to read."""

    def command(*, checkpoint: str, out: Path, panel: int, data: Path | None, **options: Any) -> None:
        from models.hooked import load
        from workbench import figures

        figures.check_format(out)
        _reading(data)
        typed = {name: _typed(value) if isinstance(value, str) else value for name, value in options.items()}
        given = {name: value for name, value in typed.items() if value != analysis.parameters[name].default}
        with _bar():
            dataset = analysis(load(checkpoint), **given)
        typer.echo(figures.save(dataset, out, _panel(analysis.fitting_views(dataset), panel)))

    command.__doc__ = f"{analysis.title}: {analysis.summary}"
    fixed = {
        "checkpoint": (CheckpointName, "baby"),
        "panel": (Panel, 1),
        "data": (Data, None),
        "out": (Out, ...),
    }
    signature = {name: _option(parameter) for name, parameter in analysis.parameters.items()} | fixed
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=annotation,
                default=inspect.Parameter.empty if default is ... else default,
            )
            for name, (annotation, default) in signature.items()
        ]
    )
    command.__annotations__ = {name: annotation for name, (annotation, _) in signature.items()}
    return command


def _reading(data: Path | None) -> None:
    """Make a text the one that analyses of the whole corpus read."""
    if data is not None:
        from models import corpus

        os.environ[corpus.VARIABLE] = str(data.resolve())


@contextmanager
def _bar() -> Iterator[None]:
    """A bar in the terminal for what takes long inside; nothing where standard error is a file."""
    from tqdm import tqdm

    from analyses.progress import reporting

    with tqdm(disable=None, leave=False, delay=0.5) as bar:

        def listen(done: int, total: int, what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.total, bar.n = total, done
            bar.update(0)

        with reporting(listen):
            yield


def _option(parameter: Parameter) -> tuple[Any, Any]:
    kind: Any = Literal[parameter.choices] if parameter.choices else parameter.type
    help = parameter.knob.help
    if parameter.type is str and not parameter.choices:
        help += r" (\n is a line break)"
    if parameter.optional:
        return Annotated[kind | None, typer.Option(help=help)], None
    default = parameter.default
    return Annotated[kind, typer.Option(help=help)], _shown(default) if isinstance(default, str) else default


def main() -> None:
    """Entry point: a user's mistake is one sentence and exit code 2; Ctrl-C is 130."""
    if sys.argv[1:2] == ["run"]:
        from analyses.catalogue import ANALYSES

        for analysis in ANALYSES:
            run_app.command(analysis.slug)(_command(analysis))
    try:
        app()
    except WorkbenchError as error:
        typer.echo(f"workbench: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
