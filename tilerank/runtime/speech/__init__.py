"""Speech out: codes of sound from the talker, and the waveform from its codes."""
