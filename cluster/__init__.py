"""Where workers run: on this machine or on a Ray cluster. Knows its work only as a dotted name.

The one package that imports `ray`; `cluster.workers.launch.run` is the way in and does not.
"""
