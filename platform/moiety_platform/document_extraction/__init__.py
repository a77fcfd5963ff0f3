"""Text of PDF files, extracted in processes with limits, since clients choose the files."""
