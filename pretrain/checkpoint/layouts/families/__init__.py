"""The families: every module of this package is one, with a `LAYOUT`."""
