"""Object stores (S3, Google Cloud Storage, Azure, the Hugging Face Hub) through fsspec.

`objects` reads and writes single objects and retries; `folders` fetches and stores folders, and `runs` whole runs.
"""
