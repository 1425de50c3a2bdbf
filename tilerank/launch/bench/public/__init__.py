"""The configs of public models that `bench make-model` imitates."""
