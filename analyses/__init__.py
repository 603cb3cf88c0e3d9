"""Analyses of a HookedTransformer: model in, labelled numbers out. See `analyses.catalogue.ANALYSES`."""
