"""Plain sentences that any language model should find less surprising than words in any order."""

TEXTS = (
    "사용자: 오늘 저녁에 뭐 먹을까?\n클로바: 김치찌개가 좋겠어요. 따뜻한 국물이 생각나네요.\n",
    "사용자: 안녕하세요\n클로바: 안녕하세요, 반갑습니다! 좋은 하루 보내세요.\n",
    "사용자: 요즘 잠을 잘 못 자\n클로바: 따뜻한 우유를 마셔 보세요. 잠이 잘 올 거예요.\n",
    "리뷰: 정말 재미있다. 또 보고 싶은 영화다.\n평가: 재미있다\n",
    "리뷰: 시간이 아깝다. 배우들의 연기도 별로였다.\n평가: 재미없다\n",
    "어제는 친구와 함께 공원에 갔다. 날씨가 좋아서 오래 걸었고, 저녁에는 집에서 밥을 먹었다.\n",
    "Yesterday I went to the park with a friend. The weather was good, so we walked for a long "
    "time, and in the evening we had dinner at home.\n",
    "User: What is the capital of France?\nAssistant: The capital of France is Paris.\n",
    "She opened the door, looked at the table, and said that the book was not there.\n",
    "In the morning he drinks a cup of coffee, reads the news and goes to work by train.\n",
)
