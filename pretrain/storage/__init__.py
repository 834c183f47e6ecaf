"""Object stores (S3, Google Cloud Storage, Azure, the Hugging Face Hub) through fsspec.

`objects` reads and writes single objects, with retries; `folders` fetches and stores folders, `runs` whole runs.
"""
