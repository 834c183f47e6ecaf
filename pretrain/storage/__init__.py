"""Object stores (S3, Google Cloud Storage, Azure, the Hugging Face hub) through fsspec.

`objects` reads and writes single objects and retries; `folders` fetches and stores whole folders; `runs` keeps a run.
"""
