# docker build -t gpt2-recipe . && docker run -it -v "$PWD/runs:/gpt2-recipe/runs" gpt2-recipe    (docs/clusters.md)
FROM python:3.12-slim
# make sets up what it needs; g++ brings gcc, with which torch.compile builds its kernels; a run records its git commit.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make && rm -rf /var/lib/apt/lists/*
WORKDIR /gpt2-recipe
COPY . .
RUN make .venv/installed
CMD ["make", "train"]
