"""Results to files: pictures (SVG, PDF, PNG) and data (CSV, NetCDF), each with its provenance inside."""

from __future__ import annotations

import io
from pathlib import Path

import xarray as xr
from matplotlib import rc_context

from analyses import catalogue
from analyses.views import View
from models.errors import WorkbenchError
from workbench.render import matplotlib as renderer
from workbench.render.plain import pictured
from workbench.render.style import joined, number, visible

PICTURES, DATA = (".svg", ".pdf", ".png"), (".csv", ".nc")
FORMATS = PICTURES + DATA


class FormatError(WorkbenchError):
    """A file name has an ending that nothing here writes."""


def caption(dataset: xr.Dataset) -> str:
    """One line under a figure: analysis, checkpoint, identity error."""
    attrs = dataset.attrs
    identity = f"{attrs['identity']}, to {number(attrs['identity_error'])}" if "identity" in attrs else ""
    model = f"{attrs['checkpoint']} ({attrs['checkpoint_id']})" if attrs["checkpoint"] else attrs["checkpoint_id"]
    return joined((attrs["title"], model, identity))


def check_format(path: str | Path) -> None:
    """Refuse a file name, or a bare suffix, that nothing here writes."""
    suffix = path if str(path).startswith(".") else Path(path).suffix
    if suffix not in FORMATS:
        raise FormatError(f"cannot write {str(path)!r}; give a name that ends in one of {' '.join(FORMATS)}")


def export(dataset: xr.Dataset, suffix: str, view: View | None = None) -> bytes:
    """A result as a file's bytes.

    Pictures show one view; CSV holds the variables of that view in long form with all coordinates; NetCDF holds the
    whole result.

    Args:
        suffix: one of .svg .pdf .png .csv .nc.
        view: the view to show; the first one that fits if None.

    Raises:
        FormatError: another suffix.
    """
    check_format(suffix)
    if suffix == ".nc":
        return bytes(dataset.to_netcdf(engine="h5netcdf"))
    view = view or catalogue.find(dataset.attrs["analysis"]).fitting_views(dataset)[0]
    if suffix == ".csv":
        variables = view.variables(dataset)
        table = dataset[variables].to_dataframe().reset_index()
        labels = [column for column in table.columns if column not in variables]
        return table[labels + variables].to_csv(index=False).encode()
    buffer = io.BytesIO()
    with rc_context(renderer.RC):
        drawn = renderer.figure(pictured(view, dataset), caption(dataset))
        drawn.savefig(buffer, format=suffix[1:], dpi=200, metadata=_metadata(dataset, suffix))
    return buffer.getvalue()


def save(dataset: xr.Dataset, path: str | Path, view: View | None = None) -> Path:
    """Write a result to a file whose ending says the format (see `export`)."""
    path = Path(path)
    content = export(dataset, path.suffix, view)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _metadata(dataset: xr.Dataset, suffix: str) -> dict[str, str | None]:
    recipe = f"{dataset.attrs['analysis']} {visible(dataset.attrs['knobs'])} on {dataset.attrs['checkpoint_id']}"
    if suffix == ".png":
        return {"Title": dataset.attrs["title"], "Description": recipe}
    if suffix == ".pdf":
        return {"Title": dataset.attrs["title"], "Subject": recipe, "CreationDate": None}
    return {"Title": dataset.attrs["title"], "Description": recipe, "Date": None}
