"""Object stores (S3, Google Cloud Storage, Azure, the Hugging Face Hub) through fsspec.

`objects` handles single objects, with retries, `folders` whole folders, `runs` runs, and `released` released models.
"""
