"""Multi-token prediction: a layer, as DeepSeek-V3 and others ship, drafts the next tokens."""
