# docker build -t gpt2-recipe . && docker run -it -v "$PWD/runs:/gpt2-recipe/runs" gpt2-recipe    (docs/clusters.md)
FROM python:3.12-slim
# make sets up what it needs; g++ brings gcc, with which torch.compile builds its kernels; a run records its git commit.
RUN apt-get update && apt-get install -y --no-install-recommends g++ git make tini && rm -rf /var/lib/apt/lists/*
WORKDIR /gpt2-recipe
COPY . .
RUN PIP_NO_CACHE_DIR=1 make .venv/installed
# `docker stop` is Ctrl-C for make and all that it has started: the run saves a checkpoint, and make waits for it.
STOPSIGNAL SIGINT
ENTRYPOINT ["tini", "-g", "--"]
CMD ["make", "train"]
