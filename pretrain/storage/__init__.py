"""Object stores (S3, Google Cloud Storage, Azure, the Hugging Face Hub) through fsspec.

`objects` reads and writes single objects, with retries; `folders` stores and fetches folders, `runs` whole runs.
"""
