"""The dashboard's entry: `streamlit run workbench/dashboard/app.py -- --checkpoint NAME`, or `workbench app`."""

from functools import partial

import streamlit as st

from analyses.catalogue import ANALYSES
from analyses.spec import GROUPS
from workbench.dashboard import controls, home, over_training, page

st.set_page_config(layout="wide", initial_sidebar_state="expanded")
started_with = controls.given()
pages = {
    analysis.slug: st.Page(partial(page.show, analysis, started_with), title=analysis.title, url_path=analysis.slug)
    for analysis in ANALYSES
}
start = st.Page(partial(home.show, started_with, pages), title="Home", url_path="home", default=True)
grouped = {group: [pages[analysis.slug] for analysis in ANALYSES if analysis.group == group] for group in GROUPS}
film = st.Page(partial(over_training.show, started_with), title="Over training", url_path="over-training")
st.navigation({"": [start], **grouped, "Training": [film]}, position="top").run()
