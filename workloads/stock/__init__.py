"""An LSTM on windows of daily features in parquet files."""
