"""Counters of all engines that the HTTP process has been connected to."""

from ...protocol.engine_state import EngineState


class Totals:
    """Counters summed over all engines, stopped ones included, so that Prometheus counters never decrease."""

    def __init__(self) -> None:
        self.preemptions = self.prompt_tokens = self.generated_tokens = self.queried_tokens = self.hit_tokens = 0
        self.speech_frames = self.speech_samples = 0
        self.kv_dir_written = self.kv_dir_read = self.kv_dir_refused = 0
        self.given_pages = self.taken_pages = self.taken_bytes = self.missed_prompts = 0
        self.transferred_prompts, self.transfer_s = 0, 0.0
        self.drafted_tokens = self.accepted_tokens = 0

    def add(self, before: EngineState, now: EngineState) -> None:
        """Add what one engine has done between two of its states."""
        self.preemptions += now.preemptions - before.preemptions
        self.prompt_tokens += now.prompt_tokens - before.prompt_tokens
        self.generated_tokens += now.generated_tokens - before.generated_tokens
        self.queried_tokens += now.queried_tokens - before.queried_tokens
        self.hit_tokens += now.hit_tokens - before.hit_tokens
        self.speech_frames += now.speech_frames - before.speech_frames
        self.speech_samples += now.speech_samples - before.speech_samples
        self.kv_dir_written += now.kv_dir_written - before.kv_dir_written
        self.kv_dir_read += now.kv_dir_read - before.kv_dir_read
        self.kv_dir_refused += now.kv_dir_refused - before.kv_dir_refused
        self.given_pages += now.given_pages - before.given_pages
        self.taken_pages += now.taken_pages - before.taken_pages
        self.taken_bytes += now.taken_bytes - before.taken_bytes
        self.missed_prompts += now.missed_prompts - before.missed_prompts
        self.drafted_tokens += now.drafted_tokens - before.drafted_tokens
        self.accepted_tokens += now.accepted_tokens - before.accepted_tokens

    def count_transfer(self, seconds: float) -> None:
        """Count a prompt of prefill ranks, `seconds` after which the answer of decode ranks began."""
        self.transferred_prompts += 1
        self.transfer_s += seconds
