# docker build -t accelerate-megatron . && docker run --rm --shm-size 1g accelerate-megatron
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && apt-get clean
WORKDIR /accelerate-megatron
COPY . .
RUN make install TORCH_INDEX=https://download.pytorch.org/whl/cpu
CMD ["make", "train"]
