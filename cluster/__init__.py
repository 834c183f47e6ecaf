"""Runs workers on this machine or on a Ray cluster. It knows their work only as a dotted name.

Workers are started with `cluster.workers.launch.run`, which does not import `ray` itself: a child process does.
"""
