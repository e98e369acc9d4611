"""Which method a target should get, before anything is trained: from configs and published figures alone, nothing measured."""
