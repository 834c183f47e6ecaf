"""Measurements side by side with peers; each module's `main(argv)` is one `./launch.sh bench NAME`."""
