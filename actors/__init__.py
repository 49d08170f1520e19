"""The shell around the rules: dispatchers, inboxes, instances, persistence, supervision. Decides nothing by itself."""
