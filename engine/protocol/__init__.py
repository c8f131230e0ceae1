"""The contract between processes: commands down, frames up, one versioned wire."""
