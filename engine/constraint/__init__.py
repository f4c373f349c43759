"""What an output must look like: grammars over the vocabulary, and which tokens they leave."""
